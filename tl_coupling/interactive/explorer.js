// Draws a map of coupling to explore: the maps of all runs side by side, and what is known of the pair that is pointed at.
const bytes = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
// Shares of 1 in 16 bits; the largest stands for "undefined".
const UNDEFINED = 65535;
const share = code => code === UNDEFINED ? NaN : code / (UNDEFINED - 1);
// Entries of matrices are the upper halves of numbers of 32 bits.
const entries = codes => new Float32Array(Uint32Array.from(codes, code => code << 16).buffer);
const digits = value => Number.isNaN(value) ? "undefined" : value.toFixed(3).replace("-", "−");
const inChance = (value, chance) => chance > 0 && !Number.isNaN(value) ? `${(value / chance).toFixed(1)} × chance` : "";
const mix = (colors, at) => colors[Math.round(Math.min(1, Math.max(0, at)) * (colors.length - 1))];
const between = (value, low, high) => Math.min(high, Math.max(low, value));
// Of lines, in the order of the runs; 3 to 1 on white and on black.
const LINES = ["#0f82c9", "#d55e00", "#009e73", "#b8609a"];
const TICK_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const PIXELS_BETWEEN_TICKS = 24;

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const {part, ...rest} = properties;
  if (part) made.dataset.part = part;
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Many runs, such as steps of training, are gone through by a slider; few stand side by side.
const isSeriesOf = map => map.runs.length > map.most_side_by_side;
// An address says what is shown: k=10&pair=8,10
function addressOf(map, {k, pair, run}) {
  return `k=${k}&pair=${map.row_keys[pair[0]]},${map.col_keys[pair[1]]}${isSeriesOf(map) ? `&run=${run}` : ""}`;
}
function choiceIn(map, address) {
  const [row, col] = (address.get("pair") || "").split(",");
  return {k: address.get("k"), pair: [map.row_keys.indexOf(Number(row || NaN)), map.col_keys.indexOf(Number(col || NaN))], run: address.get("run")};
}

// `changed` is called with {k, pair, run} whenever a reader has chosen another, in place of the page's address; `choose` of what
// is returned sets them.
function exploreCoupling(root, map, changed = null) {
  const nRows = map.rows.length, nCols = map.cols.length, m = map.matrix_k;
  // Every k that the values are known at, in order; places in it count from 1, as the k of a whole map do.
  const ks = map.ks, largestK = ks.at(-1);
  const placeOf = k => ks.indexOf(Number(k)) + 1;
  const runs = map.runs.map((run, index) => ({
    ...run, color: LINES[index % LINES.length],
    codes: new Uint16Array(bytes(run.values).buffer), A: entries(new Uint16Array(bytes(run.matrices).buffer))}));
  const isSeries = isSeriesOf(map);
  const state = {run: 0, k: map.first_k, row: map.pair[0], col: map.pair[1], isDifference: false};
  const chosen = {row: state.row, col: state.col};
  const shownRuns = () => isSeries ? [runs[state.run]] : runs;

  const valueOf = (run, k, row, col) => share(run.codes[((placeOf(k) - 1) * nRows + row) * nCols + col]);
  const isOwn = (row, col) => map.row_ids[row] === map.col_ids[col];
  const chanceOf = (run, k, row) => run.nulls[placeOf(k) - 1][row];
  const entry = (run, a, b) => run.A[((state.row * nCols + state.col) * m + a) * m + b];

  function overPairs(run, k, fold, start) {
    let folded = start;
    for (let row = 0; row < nRows; row++) for (let col = 0; col < nCols; col++) {
      const value = valueOf(run, k, row, col);
      if (!isOwn(row, col) && !Number.isNaN(value)) folded = fold(folded, value);
    }
    return folded;
  }
  // One scale for all runs and every k, so that a fall with k is seen; own pairs, always coupled most, do not count.
  const top = runs.reduce((most, run) => overPairs(run, map.first_k, Math.max, most), 1e-9);
  const meanOf = run => {
    const [sum, n] = overPairs(run, state.k, ([sum, n], value) => [sum + value, n + 1], [0, 0]);
    return n ? sum / n : NaN;
  };

  // --- the elements of the figure
  const part = name => root.querySelector(`[data-part="${name}"]`);
  const canvas = label => element("canvas", {part: "map", tabindex: 0, role: "application", "aria-label": label});
  const panel = index => {
    const name = isSeries ? "" : runs[index].name;
    const label = `Coupling of ${nRows} by ${nCols} ${map.side}s${name && `, ${name}`}; arrow keys choose a pair, which is said beside the maps`;
    const cells = element("div", {class: "tlc-cells"}, canvas(label),
      element("i", {class: "tlc-row"}), element("i", {class: "tlc-column"}), element("i", {class: "tlc-cell"}));
    return element("figure", {class: "tlc-map"},
      element("figcaption", {}, element("b", {part: "name"}), " ", element("span", {part: "mean"})),
      element("div", {class: "tlc-plot"}, element("div", {class: "tlc-across"}), element("div", {class: "tlc-down"}), cells));
  };
  const panels = (isSeries ? [0] : runs.map((run, index) => index)).map(panel);
  const slider = (name, label, attributes) => element("label", {class: "tlc-slider"}, element("output", {part: label}), " ",
    element("input", {type: "range", part: name, ...attributes}));
  const controls = element("div", {class: "tlc-controls"},
    slider("slider", "k", {min: 1, max: ks.length, value: placeOf(state.k), "aria-label": "number of top singular vectors, k"}));
  if (isSeries) controls.prepend(
    slider("runs", "run", {min: 0, max: runs.length - 1, value: 0, "aria-label": "run"}), element("button", {type: "button", part: "play"}, "play"));
  if (runs.length === 2) controls.append(element("label", {}, element("input", {type: "checkbox", part: "difference"}),
    ` ${runs[0].name} − ${runs[1].name}`));
  const scale = (name, ...labels) => element("div", {class: "tlc-scale", part: name}, ...labels);
  const sequentialScale = scale("scale", "0", element("span", {class: "tlc-bar"}, element("i", {part: "bar"}), element("i", {part: "chance"})),
    element("span", {part: "high"}, digits(top)), element("span", {part: "beyond"}));
  const divergingScale = scale("difference-scale", digits(-top), element("span", {class: "tlc-bar"}, element("i", {part: "difference-bar"})), digits(top),
    " difference");
  const [subject, ...rest] = map.heading;
  root.replaceChildren(element("div", {class: "tlc-figure"},
    element("div", {class: "tlc-heading"}, element("b", {}, subject), element("span", {class: "tlc-soft"}, rest.join(" · "))),
    element("div", {class: "tlc-panels", style: `--maps: ${panels.length}`}, ...panels),
    element("div", {class: "tlc-side"},
      element("output", {part: "said", "aria-live": "polite"}, element("b", {part: "value"}), element("b", {part: "times"}), element("span", {part: "which"}),
        element("ul", {part: "values"})),
      element("div", {}, element("div", {class: "tlc-matrices", part: "matrices"}), element("div", {class: "tlc-soft", part: "about"})),
      element("div", {}, element("div", {class: "tlc-soft"}, "This pair at every k"), element("div", {class: "tlc-curves", part: "curves"})),
      element("ul", {part: "directions"})),
    element("div", {class: "tlc-below"}, sequentialScale, divergingScale, controls, element("div", {class: "tlc-soft"},
      `Row: the ${map.side} whose Jacobian J₁ it is. Column: the ${map.side} whose top k singular vectors are used. `
      + `Grey: a ${map.side} with itself, or undefined. Point at a pair, or use the arrow keys; a click keeps it.`))));
  part("bar").style.background = `linear-gradient(to right, ${map.sequential.join(", ")})`;
  part("difference-bar").style.background = `linear-gradient(to right, ${map.diverging.join(", ")})`;

  // --- drawing
  function paint(canvas, nDown, nAcross, color) {
    const box = canvas.clientWidth || 320;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(box * ratio);
    canvas.height = Math.round(box * nDown / nAcross * ratio);
    const pen = canvas.getContext("2d");
    for (let row = 0; row < nDown; row++) for (let col = 0; col < nAcross; col++) {
      pen.fillStyle = color(row, col);
      const x = Math.floor(col * canvas.width / nAcross), y = Math.floor(row * canvas.height / nDown);
      pen.fillRect(x, y, Math.floor((col + 1) * canvas.width / nAcross) - x, Math.floor((row + 1) * canvas.height / nDown) - y);
    }
  }

  function drawTicks(box, names, pixels, isAcross) {
    const step = TICK_STEPS.find(step => step * pixels / names.length >= PIXELS_BETWEEN_TICKS) || names.length;
    box.replaceChildren();
    for (let index = 0; index < names.length; index += step)
      box.append(element("span", {style: `${isAcross ? "left" : "top"}: ${100 * (index + .5) / names.length}%`}, names[index]));
  }

  function drawMaps() {
    panels.forEach((figure, index) => {
      const run = shownRuns()[index], second = runs[1];
      const isDifference = state.isDifference && index === 1;
      figure.querySelector("canvas").style.aspectRatio = `${nCols} / ${nRows}`;
      paint(figure.querySelector("canvas"), nRows, nCols, (row, col) => {
        const value = isDifference ? valueOf(runs[0], state.k, row, col) - valueOf(second, state.k, row, col) : valueOf(run, state.k, row, col);
        if (Number.isNaN(value) || isOwn(row, col)) return map.undefined_color;
        return isDifference ? mix(map.diverging, (value / top + 1) / 2) : mix(map.sequential, value / top);
      });
      figure.querySelector("[data-part=name]").textContent = isDifference ? `${runs[0].name} − ${second.name}` : run.name;
      const mean = isDifference ? meanOf(runs[0]) - meanOf(second) : meanOf(run);
      const times = isDifference ? "" : inChance(mean, chanceOf(run, state.k, 0));
      figure.querySelector("[data-part=mean]").textContent = `mean ${digits(mean)}${times && `, ${times}`}`;
      const box = figure.querySelector("canvas").getBoundingClientRect();
      drawTicks(figure.querySelector(".tlc-across"), map.col_keys, box.width, true);
      drawTicks(figure.querySelector(".tlc-down"), map.row_keys, box.height, false);
    });
    const chance = chanceOf(runs[0], state.k, 0);
    const goesBeyond = runs.some(run => overPairs(run, state.k, Math.max, 0) > top + 1e-6);
    part("chance").style.left = `${100 * between(chance / top, 0, 1)}%`;
    part("beyond").textContent = `${goesBeyond ? "and above; " : ""}the mark is chance, ${digits(chance)}`;
    part("difference-scale").hidden = !state.isDifference;
    part("k").textContent = `k = ${state.k}`;
    part("slider").value = placeOf(state.k);
    part("slider").setAttribute("aria-valuetext", state.k);
    if (isSeries) { part("run").textContent = runs[state.run].name; part("runs").value = state.run; }
  }

  const dash = color => element("i", {style: `border-top-color: ${color}`});

  function drawValues() {
    const first = shownRuns()[0];
    const value = valueOf(first, state.k, state.row, state.col), chance = chanceOf(first, state.k, state.row);
    part("value").textContent = digits(value);
    part("times").textContent = isOwn(state.row, state.col) ? `a ${map.side} with itself` : inChance(value, chance);
    part("which").textContent = `J₁ of ${map.side} ${map.rows[state.row]}, top ${state.k} singular vectors of ${map.side} ${map.cols[state.col]}`;
    const line = (color, name, shown) => element("li", {}, dash(color), ` ${name} ${digits(shown)}`);
    const lines = shownRuns().map(run => line(run.color, run.name || "coupling", valueOf(run, state.k, state.row, state.col)));
    const nothing = line("currentColor", "chance (random subspaces)", chance);
    nothing.firstChild.style.borderTopStyle = "dashed";
    if (runs.length === 2) lines.push(element("li", {}, `${runs[0].name} − ${runs[1].name} = `
      + digits(valueOf(runs[0], state.k, state.row, state.col) - valueOf(runs[1], state.k, state.row, state.col))));
    part("values").replaceChildren(...lines, nothing);
  }

  function drawMatrices() {
    // A map may hold values alone.
    if (!m) return;
    const n = Math.min(state.k, m);
    // One scale for the pair's matrices of all runs: a twin's noise must not look like structure.
    let most = 0;
    for (const run of runs) for (let a = 0; a < n; a++) for (let b = 0; b < n; b++) most = Math.max(most, Math.abs(entry(run, a, b)));
    const box = part("matrices");
    while (box.children.length < shownRuns().length) box.append(element("figure", {},
      element("figcaption", {class: "tlc-soft"}), element("canvas", {part: "matrix", role: "img"})));
    shownRuns().forEach((run, index) => {
      const [caption, canvas] = box.children[index].children;
      caption.textContent = `A${run.name && `, ${run.name}`}`;
      canvas.setAttribute("aria-label", `Matrix A${run.name && ` of ${run.name}`}`);
      paint(canvas, n, n, (a, b) => mix(map.diverging, (entry(run, a, b) / (most || 1) + 1) / 2));
    });
    const sigma = shownRuns()[0].sigma[state.row].slice(0, n).map(s => s.toPrecision(3));
    const rows = n < state.k ? `${n} of ${state.k} rows and columns` : `${n} rows and columns`;
    const about = [`A = UᵀJ₁V, ${rows}: a diagonal line is coupling. Red is above 0 and blue below, full at `
      + `${most.toPrecision(3)}${runs.length > 1 ? " in every run" : ""}.`,
      `σ of J₁: ${sigma.join(", ")}`];
    part("about").replaceChildren(about[0], element("details", {}, element("summary", {}, "Singular values of J₁"), about[1]));
  }

  function drawCurves() {
    const width = 300, height = 80;
    const across = k => (largestK > ks[0] ? (k - ks[0]) / (largestK - ks[0]) : .5) * width;
    const path = (valueAt, style) => {
      let steps = "", isDown = false;
      for (const k of ks) {
        const value = valueAt(k);
        if (Number.isNaN(value)) { isDown = false; continue; }
        steps += `${isDown ? "L" : "M"}${across(k)},${(1 - between(value, 0, 1)) * height}`;
        isDown = true;
      }
      return `<path d="${steps}" fill="none" vector-effect="non-scaling-stroke" ${style}/>`;
    };
    const lines = [path(k => chanceOf(shownRuns()[0], k, state.row), 'stroke="currentColor" stroke-dasharray="4 3"')];
    for (const run of [...shownRuns()].reverse()) lines.push(path(k => valueOf(run, k, state.row, state.col), `stroke="${run.color}" stroke-width="2.5"`));
    part("curves").innerHTML = `<span>1</span><svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" aria-hidden="true">`
      + `<path d="M0,${height}H${width}M${across(state.k)},0V${height}" stroke="currentColor" opacity=".45" vector-effect="non-scaling-stroke"/>${lines.join("")}</svg>`
      + `<span>0</span><span>k = ${ks[0]}</span><span>${largestK}</span>`;
  }

  function drawDirections() {
    const layers = new Set([map.row_layers[state.row], map.col_layers[state.col]]);
    const items = [];
    for (const layer of layers) (map.directions[layer] || []).forEach((text, index) => {
      items.push(element("li", {}, `u${index + 1} of layer ${layer} writes ${text}`));
    });
    part("directions").replaceChildren(...items);
  }

  function drawPair() {
    for (const figure of panels) {
      const place = (name, style) => Object.assign(figure.querySelector(name).style, style);
      const down = {top: `${100 * state.row / nRows}%`, height: `${100 / nRows}%`};
      const across = {left: `${100 * state.col / nCols}%`, width: `${100 / nCols}%`};
      place(".tlc-row", down);
      place(".tlc-column", across);
      place(".tlc-cell", {...down, ...across});
    }
    drawValues();
    drawMatrices();
    drawCurves();
    drawDirections();
  }
  const redraw = () => { drawMaps(); drawPair(); };

  // --- the address of a page says what is shown
  const page = root.closest("[data-address]");
  const hasAddress = changed === null && page !== null && page.querySelector(".tlc-explorer") === root;
  const readAddress = () => choose(choiceIn(map, new URLSearchParams(location.hash.slice(1))));

  // --- choosing
  const isNumber = (value, low, high) => value !== null && value !== undefined && Number.isInteger(Number(value)) && value >= low && value <= high;
  // What is not in the map is left as it is.
  function choose({k, pair, run}) {
    if (placeOf(k ?? NaN)) state.k = Number(k);
    if (isNumber(run, 0, runs.length - 1) && isSeries) state.run = Number(run);
    if (pair && isNumber(pair[0], 0, nRows - 1) && isNumber(pair[1], 0, nCols - 1)) {
      chosen.row = state.row = pair[0];
      chosen.col = state.col = pair[1];
    }
    redraw();
  }
  function chooseAsReader(choice) {
    choose(choice);
    const shown = {k: state.k, pair: [chosen.row, chosen.col], run: state.run};
    if (hasAddress) history.replaceState(null, "", `#${addressOf(map, shown)}`);
    changed?.(shown);
  }
  const point = (row, col) => { state.row = row; state.col = col; drawPair(); };
  const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  for (const figure of panels) {
    const canvas = figure.querySelector("canvas");
    const cellAt = event => {
      const box = canvas.getBoundingClientRect();
      return [between(Math.floor((event.clientY - box.top) / box.height * nRows), 0, nRows - 1),
        between(Math.floor((event.clientX - box.left) / box.width * nCols), 0, nCols - 1)];
    };
    canvas.addEventListener("pointermove", event => point(...cellAt(event)));
    canvas.addEventListener("pointerleave", () => point(chosen.row, chosen.col));
    canvas.addEventListener("click", event => chooseAsReader({pair: cellAt(event)}));
    canvas.addEventListener("keydown", event => {
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      chooseAsReader({pair: [between(chosen.row + move[0], 0, nRows - 1), between(chosen.col + move[1], 0, nCols - 1)]});
    });
  }
  part("slider").addEventListener("input", event => chooseAsReader({k: ks[event.target.value - 1]}));
  part("difference")?.addEventListener("change", event => { state.isDifference = event.target.checked; redraw(); });
  part("runs")?.addEventListener("input", event => chooseAsReader({run: event.target.value}));
  let clock = null;
  part("play")?.addEventListener("click", event => {
    const plays = clock === null;
    event.target.textContent = plays ? "stop" : "play";
    if (!plays) { clearInterval(clock); clock = null; return; }
    clock = setInterval(() => chooseAsReader({run: (state.run + 1) % runs.length}), 600);
  });
  new ResizeObserver(redraw).observe(root);
  root.dataset.drawn = "yes";
  redraw();
  if (hasAddress) {
    readAddress();
    window.addEventListener("hashchange", readAddress);
  }
  const tell = directions => { map.directions = directions; drawDirections(); };
  return {choose, tell};
}
