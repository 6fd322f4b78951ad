// A widget colours by a value and prints the same value: this array prints as its text and counts as its shade.
const cell = (text, shade) => Object.assign([text], {valueOf: () => shade ?? NaN});
const revive = (key, value) => value?.text === undefined ? value : cell(value.text, value.shade);
for (const div of document.querySelectorAll("[data-circuitsvis]:not([id])")) {
  div.id = "circuits-vis-" + Math.random().toString(36).slice(2);
  CircuitsVis.render(div.id, CircuitsVis[div.dataset.circuitsvis], JSON.parse(div.dataset.props, revive));
}
