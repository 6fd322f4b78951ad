// Draws each `.tlc-explorer` from the numbers in its `data-map`: a map, its null, and the matrix of the chosen pair.
const bytes = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
// Shares of 1 in 16 bits; the largest stands for "undefined".
const UNDEFINED = 65535;
const share = code => code === UNDEFINED ? NaN : code / (UNDEFINED - 1);
// Entries of matrices are the upper halves of numbers of 32 bits.
const entries = codes => new Float32Array(Uint32Array.from(codes, code => code << 16).buffer);
const digits = value => Number.isNaN(value) ? "undefined" : value.toFixed(3);
const mix = (colors, at) => colors[Math.round(Math.min(1, Math.max(0, at)) * (colors.length - 1))];

function explore(root) {
  const map = JSON.parse(root.dataset.map);
  const part = name => root.querySelector(`[data-part="${name}"]`);
  const nRows = map.rows.length, nCols = map.cols.length, m = map.matrix_k;
  const runs = map.runs.map(run => ({
    ...run, codes: new Uint16Array(bytes(run.values).buffer), A: entries(new Uint16Array(bytes(run.matrices).buffer))}));
  const state = {run: 0, k: map.first_k, row: map.pair[0], col: map.pair[1]};

  const valueOf = (run, k, row, col) => share(run.codes[((k - 1) * nRows + row) * nCols + col]);
  // The last choice of several runs is the first less the second.
  const isDifference = () => state.run === runs.length;
  const value = (row, col) => isDifference()
    ? valueOf(runs[0], state.k, row, col) - valueOf(runs[1], state.k, row, col)
    : valueOf(runs[state.run], state.k, row, col);
  const isOwn = (row, col) => map.row_ids[row] === map.col_ids[col];

  // One scale for all runs at one k; own pairs, always coupled most, do not count.
  function largest() {
    let most = 1e-9;
    for (const run of runs) for (let row = 0; row < nRows; row++) for (let col = 0; col < nCols; col++) {
      const v = valueOf(run, state.k, row, col);
      if (!isOwn(row, col) && v > most) most = v;
    }
    return most;
  }

  const entry = (run, a, b) => run.A[((state.row * nCols + state.col) * m + a) * m + b];
  // One scale for the chosen pair's matrices of all runs: a twin's noise must not look like structure.
  function largestEntry(n) {
    let most = 0;
    for (const run of runs) for (let a = 0; a < n; a++) for (let b = 0; b < n; b++) most = Math.max(most, Math.abs(entry(run, a, b)));
    return most;
  }

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
    return [pen, canvas.width / nAcross, canvas.height / nDown];
  }

  const words = (row, col) => {
    const run = runs[isDifference() ? 0 : state.run];
    const shown = value(row, col), chance = run.nulls[state.k - 1][row];
    const pair = `J₁ of ${map.side} ${map.rows[row]}, vectors of ${map.side} ${map.cols[col]}`;
    if (isDifference()) return `${pair}: ${runs[0].name} − ${runs[1].name} = ${digits(shown)}`;
    const times = chance > 0 && !Number.isNaN(shown) ? `, ${(shown / chance).toFixed(1)} times the null (${digits(chance)})` : "";
    return `${pair}: coupling ${digits(shown)}${times}`;
  };

  function drawMap() {
    const most = largest();
    const [pen, width, height] = paint(part("map"), nRows, nCols, (row, col) => {
      const v = value(row, col);
      if (Number.isNaN(v) || isOwn(row, col)) return map.undefined_color;
      return isDifference() ? mix(map.diverging, (v / most + 1) / 2) : mix(map.sequential, v / most);
    });
    pen.lineWidth = 2 * (window.devicePixelRatio || 1);
    for (const color of ["white", "black"]) {
      pen.strokeStyle = color;
      pen.setLineDash(color === "white" ? [] : [4, 4]);
      pen.strokeRect(state.col * width, state.row * height, width, height);
    }
    part("low").textContent = isDifference() ? digits(-most) : "0";
    part("high").textContent = digits(most);
    part("bar").style.background = `linear-gradient(to right, ${(isDifference() ? map.diverging : map.sequential).join(", ")})`;
  }

  function drawPair() {
    const run = runs[isDifference() ? 0 : state.run], n = Math.min(state.k, m);
    const most = largestEntry(n);
    paint(part("matrix"), n, n, (a, b) => mix(map.diverging, (entry(run, a, b) / (most || 1) + 1) / 2));
    part("pair").textContent = words(state.row, state.col);
    const sigma = run.sigma[state.row].slice(0, n).map(s => s.toPrecision(3));
    const rows = n < state.k ? `${n} of ${state.k} rows and columns` : `${n} rows and columns`;
    part("about").textContent = `A = UᵀJ₁V${run.name && `, ${run.name}`}, ${rows}: red above 0, blue below, full at `
      + `${most.toPrecision(3)}${runs.length > 1 ? " in every run" : ""}. A diagonal line is coupling. σ of J₁: ${sigma.join(", ")}.`;
    const list = part("directions");
    list.replaceChildren();
    const told = new Set();
    for (const layer of [map.row_layers[state.row], map.col_layers[state.col]]) {
      if (!map.directions[layer] || told.has(layer)) continue;
      told.add(layer);
      map.directions[layer].forEach((text, i) => {
        const item = document.createElement("li");
        item.textContent = `u${i + 1} of layer ${layer} writes ${text}`;
        list.append(item);
      });
    }
  }

  const redraw = () => { part("k").textContent = `k = ${state.k}`; drawMap(); drawPair(); };
  const say = (row, col) => { part("said").textContent = words(row, col); };
  const select = (row, col) => {
    state.row = Math.min(nRows - 1, Math.max(0, row));
    state.col = Math.min(nCols - 1, Math.max(0, col));
    redraw();
    say(state.row, state.col);
  };
  const cellAt = event => {
    const box = part("map").getBoundingClientRect();
    return [Math.floor((event.clientY - box.top) / box.height * nRows), Math.floor((event.clientX - box.left) / box.width * nCols)];
  };

  const canvas = part("map");
  canvas.addEventListener("pointermove", event => {
    const [row, col] = cellAt(event);
    if (row >= 0 && col >= 0 && row < nRows && col < nCols) say(row, col);
  });
  canvas.addEventListener("pointerleave", () => say(state.row, state.col));
  canvas.addEventListener("click", event => select(...cellAt(event)));
  const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  canvas.addEventListener("keydown", event => {
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    select(state.row + move[0], state.col + move[1]);
  });
  part("slider").addEventListener("input", event => { state.k = Number(event.target.value); redraw(); say(state.row, state.col); });
  const choose = run => { state.run = run; redraw(); say(state.row, state.col); };
  root.addEventListener("change", event => {
    if (event.target.dataset.run !== undefined) choose(Number(event.target.dataset.run));
  });
  const steps = part("runs");
  if (steps) {
    const name = () => { part("run").textContent = runs[state.run].name; };
    steps.addEventListener("input", () => { choose(Number(steps.value)); name(); });
    let clock = null;
    part("play").addEventListener("click", event => {
      const plays = clock === null;
      event.target.textContent = plays ? "stop" : "play";
      if (!plays) { clearInterval(clock); clock = null; return; }
      clock = setInterval(() => {
        steps.value = (Number(steps.value) + 1) % runs.length;
        steps.dispatchEvent(new Event("input"));
      }, 600);
    });
    name();
  }
  new ResizeObserver(redraw).observe(root);
  root.dataset.drawn = "yes";
  select(state.row, state.col);
}
document.querySelectorAll(".tlc-explorer:not([data-drawn])").forEach(explore);
