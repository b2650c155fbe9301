(() => {
"use strict";

const root = document.documentElement;
const pageName = document.body.dataset.name;
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

const NARROW = 560; // pixels: a figure that is no wider has its legend below
const PAPER_WIDTH = 680; // fits A4 and letter, upright
const PAPER_HEIGHT = 0.8; // of that on a screen: two figures fit on a page
const IMAGE_WIDTH = 1000; // of files, whatever the screen
const LEGEND_SHARE = 0.3; // of the width: a legend that takes more goes below
const LEGEND_FONT = 12.5;
const LEGEND_HEIGHT = 220; // pixels: a legend that needs more can be scrolled
const GAP = 12;
const SERIES = 10; // colours of traces

/* --- Colours: "@3" is the style sheet's --3, "@3/20" with an opacity of 20 % --- */

const COLOUR = /^@(\d{1,4}|text|muted|grid|axis|page|surface|accent|good|bad)(?:\/(\d{1,3}))?$/;

function coloursOf(element) {
  const style = getComputedStyle(element);
  const found = {};
  return (name) => (found[name] ??= style.getPropertyValue("--" + name).trim());
}

function painted(value, colourOf) {
  if (typeof value === "string") {
    const match = value[0] === "@" && COLOUR.exec(value);
    if (!match) return value;
    const colour = colourOf(/^\d/.test(match[1]) ? match[1] % SERIES : match[1]);
    if (match[2] === undefined) return colour;
    const parts = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
    return `rgba(${parts.join(",")},${match[2] / 100})`;
  }
  if (Array.isArray(value)) return value.map((item) => painted(item, colourOf));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.entries(value).map(([name, item]) => [name, painted(item, colourOf)]),
  );
}

/* What figures have in common; a figure's own layout goes before it. */
const AXIS = {
  automargin: true,
  gridcolor: "@grid",
  linecolor: "@axis",
  separatethousands: true,
  ticks: "outside",
  zeroline: false,
  zerolinecolor: "@axis",
  title: { font: { size: 13 }, standoff: 12 },
};
const TEMPLATE = {
  layout: {
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "@text" },
    colorway: Array.from({ length: SERIES }, (_, index) => "@" + index),
    colorscale: {
      sequential: [[0, "@grid"], [1, "@0"]],
      sequentialminus: [[0, "@1"], [1, "@grid"]],
      diverging: [[0, "@1"], [0.5, "@grid"], [1, "@0"]],
    },
    paper_bgcolor: "@page",
    plot_bgcolor: "@page",
    margin: { l: 56, r: 18, t: 14, b: 44 },
    hovermode: "closest",
    hoverlabel: {
      align: "left",
      bgcolor: "@surface",
      bordercolor: "@axis",
      font: { color: "@text" },
      namelength: -1,
    },
    legend: { font: { size: LEGEND_FONT }, itemwidth: 36, tracegroupgap: 4 },
    xaxis: { ...AXIS, showline: true, tickcolor: "@axis", ticklen: 4 },
    yaxis: { ...AXIS, tickcolor: "@page", ticklen: 6 }, // a little distance, and no marks
    coloraxis: { colorbar: { outlinewidth: 0, thickness: 14 } },
    annotationdefaults: { arrowcolor: "@muted", font: { color: "@text" } },
    shapedefaults: { line: { color: "@muted" } },
  },
  data: {
    bar: [{ error_x: { color: "@text" }, error_y: { color: "@text" } }],
    heatmap: [{ autocolorscale: true, colorbar: { outlinewidth: 0, thickness: 14 } }],
    scatter: [{ line: { width: 2 }, marker: { size: 7 } }],
  },
};

/* --- plotly.js, which travels in the page --- */

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  return bytes;
}

async function unpackPlotly() {
  const holder = document.getElementById("_plotly");
  const packed = new Blob([bytesOf(holder.textContent)]).stream();
  const source = await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  holder.remove();
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  script.remove();
  if (!window.Plotly) throw new Error("plotly.js did not start");
}

/* --- Figures --- */

const pen = document.createElement("canvas").getContext("2d");

function widthOf(text, size) {
  pen.font = `${size}px ${TEMPLATE.layout.font.family}`;
  return pen.measureText(text).width;
}

/* Breaks a line between words, so that no line is wider than so many pixels. */
function wrapped(text, pixels, size) {
  const lines = [""];
  for (const word of String(text).split(" ")) {
    const last = lines.length - 1;
    const longer = lines[last] ? `${lines[last]} ${word}` : word;
    if (lines[last] && widthOf(longer, size) > pixels) lines.push(word);
    else lines[last] = longer;
  }
  return lines.join("<br>");
}

const plainText = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

class Figure {
  constructor(box) {
    this.box = box;
    this.key = box.id;
    this.title = box.querySelector("h3").textContent;
    this.plot = box.querySelector(".plot");
    this.alt = this.plot.getAttribute("aria-label");
    this.contents = all(".content", box);
    this.names = all("[data-does=choose]", box).flatMap((each) =>
      each.options ? [...each.options].map((option) => option.text) : [each.textContent],
    );
    this.chosen = 0;
    this.scales = {}; // of the axes whose buttons were pressed
    this.isDrawn = false; // or was to be, while its table was shown
    this.isDue = false;
    this.width = 0;
    this.parsed = new Map();
    this.choose(0);
  }

  get table() {
    return this.contents[this.chosen].querySelector("table");
  }

  get content() {
    if (!this.parsed.has(this.chosen)) {
      const holder = this.contents[this.chosen].querySelector("script");
      this.parsed.set(this.chosen, JSON.parse(holder.textContent));
    }
    return this.parsed.get(this.chosen);
  }

  choose(index) {
    if (!this.contents[index]) return;
    this.chosen = index;
    for (const each of all("[data-does=choose]", this.box)) {
      if (each.options) each.value = index;
      else each.setAttribute("aria-pressed", String(Number(each.value) === index));
    }
    if (root.classList.contains("draws")) {
      // Else there is no figure, and every table is there to be read.
      this.contents.forEach((content, place) => (content.hidden = place !== index));
    }
    const name = this.names[index];
    this.plot.setAttribute("aria-label", name ? `${this.alt} Shown: ${name}.` : this.alt);
    this.markScales();
  }

  show(what) {
    this.box.dataset.shows = what;
    for (const button of all("[data-does=show]", this.box)) {
      button.setAttribute("aria-pressed", String(button.value === what));
    }
    if (what === "figure" && this.isDue) this.draw();
  }

  isLog(axis) {
    return (this.scales[axis] ?? this.content.layout[axis + "axis"]?.type) === "log";
  }

  toggleLog(axis) {
    this.scales[axis] = this.isLog(axis) ? "linear" : "log";
    this.markScales();
  }

  markScales() {
    for (const button of all("[data-does=log]", this.box)) {
      button.setAttribute("aria-pressed", String(this.isLog(button.value)));
    }
  }

  /* The traces and the layout for so many pixels, in the colours of an element. */
  prepared(width, element) {
    const isNarrow = width <= NARROW;
    const { data, layout } = structuredClone(this.content);
    const share = root.classList.contains("printing") ? PAPER_HEIGHT : 1;
    const height = share * (layout.height ?? (isNarrow ? 340 : 420));
    Object.assign(layout, { template: TEMPLATE, width, height, autosize: false });
    if (isNarrow) {
      layout.font = { ...layout.font, size: 12 };
      layout.dragmode = false; // a finger on the figure scrolls the page
      for (const trace of data) if (trace.name) trace.name = wrapped(trace.name, width - 60, 12);
    }
    for (const name of Object.keys(layout).filter((each) => /^[xy]axis\d*$/.test(each))) {
      this.fitAxis(layout, name, width);
    }
    const colourOf = coloursOf(element);
    return { data: painted(data, colourOf), layout: painted(layout, colourOf), isNarrow };
  }

  fitAxis(layout, name, width) {
    const axis = layout[name];
    const scale = this.scales[name[0]];
    if (scale && scale !== (axis.type ?? "linear")) {
      axis.type = scale;
      delete axis.range; // it was one of the other scale
    }
    const [start, end] = axis.domain ?? [0, 1];
    const room = name[0] === "x" ? width - 120 : layout.height - 60;
    if (axis.title?.text) axis.title.text = wrapped(axis.title.text, (end - start) * room, 13);
  }

  /* Draws, or draws anew, as wide as there is room; later if the figure is not to be seen now. */
  async draw() {
    this.isDrawn = true;
    this.isDue = this.box.dataset.shows !== "figure"; // what is not shown cannot be measured
    if (this.isDue) return;
    try {
      this.width = root.classList.contains("printing") ? PAPER_WIDTH : this.box.clientWidth;
      await drawWithLegend(this.plot, this.prepared(this.width, root));
      this.plot.style.minHeight = "";
    } catch (error) {
      console.error(`The figure '${this.key}' cannot be drawn`, error);
      this.show("table");
    }
  }

  async image(format) {
    const { data, layout } = this.prepared(IMAGE_WIDTH, document.getElementById("_light"));
    const name = this.names[this.chosen];
    addTitle(layout, name ? `${this.title} (${name})` : this.title);
    const sheet = document.createElement("div");
    sheet.className = "sheet";
    document.body.append(sheet);
    try {
      await drawWithLegend(sheet, { data, layout, isNarrow: false });
      return await Plotly.toImage(sheet, {
        format,
        width: sheet.layout.width,
        height: sheet.layout.height,
        scale: format === "png" ? 2 : 1,
        imageDataOnly: true,
      });
    } finally {
      Plotly.purge(sheet);
      sheet.remove();
    }
  }
}

/* A file has no heading beside it. */
function addTitle(layout, title) {
  const text = wrapped(plainText(title), layout.width - 60, 18);
  const lines = text.split("<br>").length;
  const place = { x: 0, xref: "container", y: 1, yref: "container", yanchor: "top" };
  const pad = { l: 16, t: 4 + 12 * lines }; // plotly.js anchors the middle of several lines
  layout.title = { text, ...place, pad, font: { size: 18 } };
  layout.margin = { ...layout.margin, t: 26 + 24 * lines };
  layout.height += layout.margin.t;
}

const CONFIG = { displayModeBar: false, displaylogo: false, responsive: false, showTips: false };

/* A legend stands at the right where there is room, else below the axis and what is written there;
   plotly.js by itself would write one over the other. Nothing is awaited between the steps: they
   are done when the function returns, as a page that is about to be printed needs it. */
function drawWithLegend(plot, { data, layout, isNarrow }) {
  const isPlaced = layout.legend?.x !== undefined || layout.legend?.orientation !== undefined;
  const isBelow = isNarrow || (!isPlaced && legendWidth(data) > LEGEND_SHARE * layout.width);
  // Not Plotly.react: it would keep the angles of labels that had another width.
  const first = isBelow ? withLegendBelow(layout, GAP) : layout;
  const done = Plotly.newPlot(plot, data, first, CONFIG);
  const legend = isBelow && plot.querySelector(".legend");
  if (!legend) return done;
  const { height } = legend.getBoundingClientRect();
  return Plotly.react(plot, data, withLegendBelow(layout, roomBelow(plot), height), CONFIG);
}

function legendWidth(data) {
  const named = data.filter((trace) => trace.name && trace.showlegend !== false);
  const lines = named.flatMap((trace) => String(trace.name).split("<br>"));
  return Math.max(0, ...lines.map((line) => widthOf(line, LEGEND_FONT))) + 60;
}

/* How far the axis and its title reach below the plot. */
function roomBelow(plot) {
  const { t, h } = plot._fullLayout._size;
  const bottom = plot.getBoundingClientRect().top + t + h;
  const reach = all(".xaxislayer-above, .xaxislayer-below, [class*=xtitle]", plot)
    .map((part) => part.getBoundingClientRect())
    .filter((box) => box.height > 0)
    .map((box) => box.bottom - bottom);
  return Math.max(0, ...reach) + GAP;
}

function withLegendBelow(layout, room, legendHeight) {
  const margin = { ...TEMPLATE.layout.margin, ...layout.margin };
  const inner = layout.height - margin.t - margin.b;
  const legend = {
    ...layout.legend,
    orientation: "h",
    x: 0,
    xanchor: "left",
    y: -room / inner,
    yanchor: "top",
    maxheight: LEGEND_HEIGHT,
  };
  if (legendHeight === undefined) return { ...layout, legend };
  const b = room + legendHeight + GAP / 2;
  return { ...layout, legend, margin: { ...margin, b }, height: layout.height - margin.b + b };
}

const figures = new Map(all(".figure").map((box) => [box.id, new Figure(box)]));

/* All that are drawn already, again; or all that are not yet. */
function drawWhere(isDrawn) {
  const chosen = [...figures.values()].filter((figure) => figure.isDrawn === isDrawn);
  return Promise.all(chosen.map((figure) => figure.draw()));
}

/* Draws what comes near the window, and again what gets another width. */
function watchFigures() {
  const nearby = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      const figure = figures.get(target.id);
      if (isIntersecting && !figure.isDrawn) figure.draw();
    }
  }, { rootMargin: "600px 0px" });
  const resized = new ResizeObserver((entries) => {
    if (root.classList.contains("printing")) return;
    for (const { target } of entries) {
      const figure = figures.get(target.id);
      if (figure.isDrawn && figure.width !== target.clientWidth) figure.draw();
    }
  });
  for (const { box } of figures.values()) {
    nearby.observe(box);
    resized.observe(box);
  }
}

function watchColours() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawWhere(true));
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    drawWhere(true);
    drawWhere(false);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    drawWhere(true);
  });
}

/* --- Tables --- */

const cellValue = (cell) => cell.dataset.v ?? cell.textContent;

function csvOf(table) {
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  const line = (row) => [...row.cells].map((cell) => quoted(cellValue(cell))).join(",");
  return [...table.rows].map((row) => line(row) + "\r\n").join("");
}

function compared(left, right, sign) {
  const [a, b] = [cellValue(left), cellValue(right)];
  if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last
  const [x, y] = [Number(a), Number(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return sign * a.localeCompare(b, "en", { numeric: true });
  return sign * (x - y);
}

const NEXT_ORDER = { none: "ascending", ascending: "descending", descending: "none" };

function sortBy(table, column, order) {
  const body = table.tBodies[0];
  table.unsorted ??= [...body.rows];
  const rows = [...table.unsorted];
  const sign = order === "descending" ? -1 : 1;
  if (order !== "none") rows.sort((a, b) => compared(a.cells[column], b.cells[column], sign));
  body.append(...rows);
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    if (place === column && order !== "none") head.setAttribute("aria-sort", order);
    else head.removeAttribute("aria-sort");
  });
}

function makeSortable(table) {
  if (table.tBodies[0].rows.length < 3) return;
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.does = "sort";
    button.append(...head.childNodes);
    head.append(button);
  }
}

/* --- Files and the clipboard --- */

function say(text) {
  document.getElementById("_status").textContent = text;
}

function save(parts, type, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts, { type }));
  link.download = `${pageName}-${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`${link.download} is saved`);
}

async function saveImage(figure, format) {
  const name = figure.names[figure.chosen];
  const file = (name ? figure.table.id : figure.key) + "." + format;
  const image = await figure.image(format);
  if (format === "png") save([bytesOf(image)], "image/png", file);
  else save([image], "image/svg+xml", file);
}

async function copy(button) {
  const code = button.closest(".view").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // Browsers that keep the clipboard from files still copy what is selected.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  say("Copied");
  button.dataset.done = "";
  setTimeout(() => delete button.dataset.done, 2000);
}

/* --- Buttons and switches --- */

const ACTIONS = {
  choose(control, figure) {
    figure.choose(Number(control.value));
    if (figure.isDrawn) figure.draw();
  },
  log(control, figure) {
    figure.toggleLog(control.value);
    if (figure.isDrawn) figure.draw();
  },
  show(control, figure) {
    figure.show(control.value);
  },
  png: (control, figure) => saveImage(figure, "png"),
  svg: (control, figure) => saveImage(figure, "svg"),
  csv(control, figure) {
    const table = figure ? figure.table : control.closest(".view").querySelector("table");
    save([csvOf(table)], "text/csv", table.id.replace(/_table$/, "") + ".csv");
  },
  copy,
  sort(control) {
    const head = control.closest("th");
    const order = NEXT_ORDER[head.getAttribute("aria-sort") ?? "none"];
    sortBy(head.closest("table"), head.cellIndex, order);
  },
  pause(control) {
    const isPaused = control.getAttribute("aria-pressed") !== "true";
    control.setAttribute("aria-pressed", String(isPaused));
    if (!isPaused) renewLater();
  },
};

function act(event) {
  const control = event.target.closest?.("[data-does]");
  if (!control || (control.matches("select") && event.type === "click")) return;
  const box = control.closest(".figure");
  ACTIONS[control.dataset.does](control, box && figures.get(box.id));
}

/* --- A page that renews itself looks afterwards as it did before --- */

const STATE = "flockstep:" + location.pathname;
const CONTROLS = "a[href], button, select, [tabindex]";

function placeOfFocus() {
  const holder = document.activeElement?.closest("[id]");
  const place = holder ? all(CONTROLS, holder).indexOf(document.activeElement) : -1;
  return place < 0 ? null : { holder: holder.id, place };
}

/* What the reader looks at, and where in the window it is: what stands above may grow. */
function placeOfEye() {
  const above = all(".view, section").filter((each) => {
    const { top, height } = each.getBoundingClientRect();
    return height > 0 && top <= innerHeight / 3;
  });
  const seen = scrollY > 0 && above.pop();
  return seen ? { id: seen.id, top: seen.getBoundingClientRect().top } : null;
}

function keepState() {
  const kept = { eye: placeOfEye(), focus: placeOfFocus(), figures: {}, sorted: {} };
  for (const [key, figure] of figures) {
    const { chosen, scales } = figure;
    const { shows } = figure.box.dataset;
    const height = figure.isDrawn ? figure.plot.offsetHeight : 0;
    kept.figures[key] = { chosen, scales, shows, height };
  }
  for (const head of all("th[aria-sort]")) {
    kept.sorted[head.closest("table").id] = [head.cellIndex, head.getAttribute("aria-sort")];
  }
  sessionStorage.setItem(STATE, JSON.stringify(kept));
}

function restoreState() {
  const text = sessionStorage.getItem(STATE);
  if (!text) return;
  sessionStorage.removeItem(STATE);
  // Not before: the browser would scroll to where the page was, whatever stands there now.
  addEventListener("load", () => setTimeout(() => (history.scrollRestoration = "auto")));
  const kept = JSON.parse(text);
  for (const [key, was] of Object.entries(kept.figures)) {
    const figure = figures.get(key);
    if (!figure) continue;
    figure.scales = was.scales;
    figure.choose(was.chosen);
    figure.show(was.shows);
    // As high as it will be, so that the page does not move under the reader.
    if (was.height) figure.plot.style.minHeight = was.height + "px";
  }
  for (const [id, [column, order]] of Object.entries(kept.sorted)) {
    const table = document.getElementById(id);
    if (table?.tHead?.rows[0].cells[column]) sortBy(table, column, order);
  }
  const holder = kept.focus && document.getElementById(kept.focus.holder);
  if (holder) all(CONTROLS, holder)[kept.focus.place]?.focus({ preventScroll: true });
  const seen = kept.eye && document.getElementById(kept.eye.id);
  if (!seen) return;
  const moved = seen.getBoundingClientRect().top - kept.eye.top;
  scrollBy({ top: moved, behavior: "instant" });
}

let renewal;

function renewLater() {
  clearTimeout(renewal);
  renewal = setTimeout(renew, 1000 * document.body.dataset.renewsEvery);
}

function renew() {
  if (document.querySelector("[data-does=pause]").getAttribute("aria-pressed") === "true") return;
  if (document.hidden) {
    // Nobody looks: it can wait until somebody does.
    document.addEventListener("visibilitychange", renew, { once: true });
    return;
  }
  try {
    keepState();
    history.scrollRestoration = "manual";
  } finally {
    location.reload();
  }
}

/* --- Start --- */

function start() {
  all("table").forEach(makeSortable);
  document.addEventListener("click", act);
  document.addEventListener("change", act);
  try {
    restoreState();
  } catch (error) {
    console.warn("The page does not know how it looked before", error);
  }
  if (document.body.dataset.renewsEvery) renewLater();
  if (!root.classList.contains("draws") || figures.size === 0) return Promise.resolve();
  return unpackPlotly().then(() => {
    watchFigures();
    watchColours();
  }).catch((error) => {
    console.error("Figures cannot be drawn", error);
    root.classList.remove("draws");
    for (const { contents } of figures.values()) contents.forEach((each) => (each.hidden = false));
  });
}

const ready = start();

/* `drawn()` draws all figures that are not there yet, and is done when they are. */
window.flockstepReport = {
  drawn: () => ready.then(() => (root.classList.contains("draws") ? drawWhere(false) : undefined)),
};
})();
