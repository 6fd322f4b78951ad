// How the site's search orders what it finds (`html_search_scorer`): Sphinx's own values,
// and a function or class before a method or property of the same name.
var Scorer = {
  score: ([docname, title, anchor, description, score]) =>
    /^Python (function|class),/.test(description) ? score + 1 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
