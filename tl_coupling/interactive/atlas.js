// Filters the small maps of an atlas, and opens the figure that an address names: #map=gpt2/gsm8k&k=10&pair=8,10
function showAtlas(root) {
  const atlas = JSON.parse(root.dataset.atlas);
  const smallMaps = [...root.querySelectorAll(".tlc-small")];
  const place = root.querySelector("[data-part=open]");
  const figures = new Map();
  let opener = null;

  // --- filters, one for each fact of a map
  const WORDS = {model: "Model", state: "Weights", task: "Task"};
  const count = element("output", {part: "count", "aria-live": "polite"});
  const selects = Object.entries(WORDS).map(([fact, word]) => {
    const values = [...new Set(smallMaps.map(map => map.dataset[fact]))];
    const select = element("select", {part: fact}, element("option", {value: ""}, "all"), ...values.map(value => element("option", {value}, value)));
    select.addEventListener("change", filter);
    return element("label", {}, `${word} `, select);
  });
  place.after(element("div", {class: "tlc-filters"}, ...selects, count));
  function filter() {
    const wanted = [...root.querySelectorAll(".tlc-filters select")].filter(select => select.value);
    for (const map of smallMaps) map.hidden = wanted.some(select => map.dataset[select.dataset.part] !== select.value);
    for (const section of root.querySelectorAll("section")) section.hidden = !section.querySelector(".tlc-small:not([hidden])");
    const n = smallMaps.filter(map => !map.hidden).length;
    count.textContent = `${n} of ${smallMaps.length} maps`;
  }
  filter();

  // --- figures
  function drawn(name) {
    if (figures.has(name)) return figures.get(name);
    const figure = atlas.figures[name];
    const runs = figure.runs.map(run => ({...run, nulls: run.nulls.map(null_ => figure.rows.map(() => null_))}));
    const map = {...atlas.shared, ...figure, runs};
    const box = element("div", {class: "tlc-explorer"});
    place.append(box);
    const write = shown => history.replaceState(null, "", `#map=${encodeURI(name)}&${addressOf(map, shown)}`);
    figures.set(name, {box, map, choose: exploreCoupling(box, map, write).choose});
    return figures.get(name);
  }
  function close() {
    place.hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
    (opener || smallMaps[0]).focus();
  }
  const closing = element("button", {type: "button", part: "close"}, "Close");
  closing.addEventListener("click", close);
  place.append(closing);
  place.addEventListener("keydown", event => { if (event.key === "Escape") close(); });

  function open() {
    const address = new URLSearchParams(location.hash.slice(1));
    const name = address.get("map");
    place.hidden = !(name in atlas.figures);
    if (place.hidden) return;
    const {box, map, choose} = drawn(name);
    for (const other of place.querySelectorAll(".tlc-explorer")) other.hidden = other !== box;
    choose(choiceIn(map, address));
    place.scrollIntoView({block: "start"});
  }
  root.addEventListener("click", event => {
    const link = event.target.closest(".tlc-small");
    if (!link) return;
    event.preventDefault();
    opener = link;
    history.pushState(null, "", link.getAttribute("href"));
    open();
    place.querySelector(".tlc-explorer:not([hidden]) canvas").focus({preventScroll: true});
  });
  window.addEventListener("popstate", open);
  root.dataset.drawn = "yes";
  open();
}
for (const root of document.querySelectorAll(".tlc-atlas:not([data-drawn])")) showAtlas(root);
