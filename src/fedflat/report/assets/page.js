"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const canvases = [...document.querySelectorAll(".canvas")];
const touch = matchMedia("(pointer: coarse)").matches;
const root = document.documentElement;

// Start with maps on touch screens, where dragging should scroll and not rotate a surface, and without WebGL.
let eye = null; // the camera of all surfaces, once one of them was turned
let form = touch || !document.createElement("canvas").getContext("webgl") ? "map" : "surface";

function colours() {
  const look = getComputedStyle(root);
  const [ink, grid, card] = ["--ink", "--grid", "--card"].map((name) => look.getPropertyValue(name).trim());
  return { ink, grid, card };
}

/** The layout of a figure in the colours of the theme. */
function themed(layout) {
  const { ink, grid, card } = colours();
  const clear = "rgba(0,0,0,0)";
  const axis = (own) => ({ gridcolor: grid, zerolinecolor: grid, linecolor: grid, ...own });
  const result = {
    ...layout, autosize: true, uirevision: "kept", paper_bgcolor: clear, plot_bgcolor: clear,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: ink } },
    dragmode: touch ? false : "zoom",
  };
  if (layout.xaxis) Object.assign(result, { xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis) });
  if (layout.shapes) result.shapes = layout.shapes.map((shape) => ({ ...shape, line: { ...shape.line, color: ink, width: 1 } }));
  if (layout.scene) {
    const wall = { gridcolor: grid, zerolinecolor: grid, color: ink, backgroundcolor: clear, showbackground: false };
    const { xaxis, yaxis, zaxis } = layout.scene;
    result.scene = { ...layout.scene, ...(eye && { camera: eye }), dragmode: "turntable", xaxis: { ...wall, ...xaxis }, yaxis: { ...wall, ...yaxis }, zaxis: { ...wall, ...zaxis } };
  }
  return result;
}

/** The heights of a landscape at a round: those of its last frame up to that round, else of its first. */
function heights(figure, round) {
  const frame = figure.frames.findLast((each) => each.round <= round) ?? figure.frames[0];
  const told = (height) => (height === null ? "" : Number((figure.logarithmic ? 10 ** height : height).toPrecision(4)));
  return { z: frame.z, text: frame.z.map((row) => row.map(told)) };
}

/** The data and layout to draw: the chosen form and round of a landscape, and only the lines that are switched on. */
function shown(figure, round) {
  const chosen = figure.forms ? { ...figure.forms[form].trace, ...heights(figure, round ?? Infinity) } : {};
  const data = figure.data.map((trace) => ({ ...trace, ...chosen, visible: trace.meta === undefined || on(trace.meta) }));
  return [data, themed(figure.forms?.[form].layout ?? figure.layout), { responsive: true, displayModeBar: false }];
}

const boxes = [...document.querySelectorAll("[data-switch]")];
const on = (place) => boxes[place].checked;
const visible = (canvas) => !canvas.closest("[hidden]");
const say = (text) => { document.getElementById("said").textContent = text; };

boxes.forEach((box, place) => box.addEventListener("change", () => {
  document.querySelectorAll(`[data-line="${place}"]`).forEach((part) => { part.hidden = !box.checked; });
  canvases.filter(visible).forEach(draw);
}));

const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
function paint(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  theme.setAttribute("aria-pressed", String(dark));
}
theme.addEventListener("click", () => { paint(root.dataset.theme !== "dark"); canvases.filter(visible).forEach(draw); });
system.addEventListener("change", () => { paint(system.matches); canvases.filter(visible).forEach(draw); });
paint(system.matches);

const surfaces = canvases.filter((canvas) => figures[canvas.dataset.figure].forms);
const formButton = document.getElementById("form");
formButton?.addEventListener("click", () => {
  form = form === "map" ? "surface" : "map";
  formButton.setAttribute("aria-pressed", String(form === "map"));
  surfaces.forEach((canvas) => { Plotly.purge(canvas); canvas.linked = false; });
  surfaces.filter(visible).forEach(draw);
});
formButton?.setAttribute("aria-pressed", String(form === "map"));

/** Keeps the cameras of all surfaces in sync. */
let turning = false;
function turn(camera, from) {
  eye = camera;
  if (turning) return;
  turning = true;
  const others = surfaces.filter((canvas) => canvas !== from && visible(canvas));
  Promise.all(others.map((canvas) => Plotly.relayout(canvas, { "scene.camera": camera }))).finally(() => { turning = false; });
}

async function draw(canvas) {
  const figure = figures[canvas.dataset.figure];
  await Plotly.react(canvas, ...shown(figure, canvas.round));
  if (figure.forms && form === "surface" && !canvas.linked) {
    canvas.linked = true;
    canvas.on("plotly_relayout", (change) => { if (change["scene.camera"]) turn(change["scene.camera"], canvas); });
  }
}

const STEP = Math.PI / 12;
const KEYS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, STEP], ArrowDown: [0, -STEP] };
surfaces.forEach((canvas) => canvas.addEventListener("keydown", (event) => {
  if (form !== "surface" || !(event.key in KEYS)) return;
  event.preventDefault();
  const [around, up] = KEYS[event.key];
  const camera = canvas.layout.scene.camera;
  const { x, y, z } = camera.eye;
  const far = Math.hypot(x, y, z);
  const height = Math.min(1.5, Math.max(-1.5, Math.asin(z / far) + up));
  const side = Math.atan2(y, x) + around;
  const eye = { x: far * Math.cos(height) * Math.cos(side), y: far * Math.cos(height) * Math.sin(side), z: far * Math.sin(height) };
  Plotly.relayout(canvas, { "scene.camera": { ...camera, eye } });
}));

/** The slider and the button of a film show the same round in all of its plots. */
document.querySelectorAll(".film").forEach((film) => {
  const [slider, told, play] = ["input", "output", ".play"].map((name) => film.querySelector(name));
  const rounds = JSON.parse(slider.dataset.rounds);
  const plots = [...film.querySelectorAll(".canvas")];
  let clock = null;
  function show() {
    told.textContent = rounds[slider.value];
    slider.setAttribute("aria-valuetext", `round ${rounds[slider.value]}`);
    return Promise.all(plots.map((canvas) => {
      canvas.round = rounds[slider.value];
      const { z, text } = heights(figures[canvas.dataset.figure], canvas.round);
      return visible(canvas) && canvas.data ? Plotly.restyle(canvas, { z: [z], text: [text] }) : null;
    }));
  }
  function stop() { clearTimeout(clock); clock = null; play.textContent = "Play"; }
  async function step() {
    await show();
    if (clock === null) return;
    if (Number(slider.value) === rounds.length - 1) stop();
    else clock = setTimeout(() => { slider.value = Number(slider.value) + 1; step(); }, 700);
  }
  slider.addEventListener("input", () => { stop(); show(); });
  play.addEventListener("click", () => {
    if (clock !== null) return stop();
    if (Number(slider.value) === rounds.length - 1) slider.value = 0;
    clock = 0;
    play.textContent = "Pause";
    step();
  });
});

document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => {
  const text = button.nextElementSibling;
  getSelection().selectAllChildren(text);
  (navigator.clipboard?.writeText(text.textContent) ?? Promise.reject()).catch(() => document.execCommand("copy")).then(() => say("copied"));
}));

// Fixed heights keep the page layout stable while the plots are drawn one by one.
(async () => {
  for (const canvas of canvases) await draw(canvas);
  root.dataset.drawn = "true";
})();
