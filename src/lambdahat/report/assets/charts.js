"use strict";
// Draws figures of plotly_charts.py in the colours of the theme; Plotly is loaded by whoever draws
const Charts = (() => {
  const root = document.documentElement;
  const HOVERS = matchMedia("(hover: hover)").matches; // a mouse, not a finger
  const figures = new Map(); // of drawn charts, by element

  // Colours: "@s0/0.2" is the theme's --s0 at that opacity
  function colour(name) {
    const [token, alpha] = name.slice(1).split("/");
    const hex = getComputedStyle(root).getPropertyValue("--" + token).trim();
    if (alpha === undefined) return hex;
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    return `rgba(${parts.join(",")},${alpha})`;
  }
  function coloured(value, key) {
    if (Array.isArray(value)) return ["x", "y", "z", "customdata"].includes(key) ? value : value.map((part) => coloured(part));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, coloured(part, name)]));
    const token = typeof value === "string" && /color$/.test(key || "") && value.startsWith("@");
    return token ? colour(value) : value;
  }
  // A chart is as much higher as its legend needs beyond one row
  // A chart too low for its legend is never drawn, so its rows are first guessed from the names, then measured
  const LEAST = 210, ROW = 28, SAMPLE = 45, SIDES = 68, heights = new Map();
  const ruler = document.createElement("canvas").getContext("2d");
  function guessed(place, width) {
    const { data, layout } = figures.get(place);
    ruler.font = "12px " + getComputedStyle(document.body).fontFamily;
    const shown = layout.showlegend ? data.filter((trace) => trace.showlegend !== false) : [];
    const widths = shown.map((trace) => ruler.measureText(trace.name).width + SAMPLE);
    if (!widths.length) return 0;
    const inOne = widths.reduce((one, other) => one + other) <= width - SIDES;
    const across = inOne ? widths.length : Math.max(1, Math.floor((width - SIDES / 2) / Math.max(...widths)));
    return Math.ceil(widths.length / across) * (ROW + 1) - ROW;
  }
  let part = 1; // of its height: on paper charts are lower
  const shrink = (ratio) => (part = ratio);
  const base = (place, { height, scene }) => (scene ? Math.min(height, place.clientWidth) : height);
  const grown = (place) => part * base(place, figures.get(place).layout) + (heights.get(place) || 0);
  function needed(place) {
    const legend = place.querySelector(".legend .bg");
    const more = legend ? Math.max(0, Math.ceil(legend.getBoundingClientRect().height) - ROW) : 0;
    return more + lacking(place, more);
  }
  // Long names below an axis leave little of the frame, which is at least as high as the title beside it
  function lacking(place, more) {
    const size = place._fullLayout._size;
    if (!size || figures.get(place).layout.scene) return 0;
    const least = Math.max(part * LEAST, place.querySelector(".ytitle")?.getBoundingClientRect().height || 0);
    return Math.max(0, Math.ceil(least - size.h - more + (heights.get(place) || 0)));
  }
  // On a phone the bar of a map lies above it, and a landscape stands further away, so that its names are whole
  const CELLS = 7, narrow = (place) => place.clientWidth < 400;
  function tracesOf(place, figure) {
    const traces = coloured(figure.data);
    for (const trace of narrow(place) ? traces : []) {
      const bar = trace.colorbar;
      if (trace.x.length > CELLS) delete trace.texttemplate; // no number can be read there
      if (bar) Object.assign(bar, { orientation: "h", x: 0.5, y: 1.02, yanchor: "bottom", title: { ...bar.title, side: "top" } });
    }
    return traces;
  }
  function layoutOf(place, figure, size) {
    const layout = coloured(figure.layout);
    if (layout.scene && narrow(place)) for (const way of ["x", "y", "z"]) layout.scene.camera.eye[way] *= 1.12;
    const small = narrow(place) && !layout.showlegend && figure.data[0]?.z;
    const look = { gridcolor: colour("@rule"), linecolor: colour("@rule"), zerolinecolor: colour("@rule") };
    for (const axis of [layout.xaxis, layout.yaxis, layout.scene?.xaxis, layout.scene?.yaxis, layout.scene?.zaxis])
      if (axis) Object.assign(axis, look);
    const family = getComputedStyle(document.body).fontFamily;
    return {
      ...layout, autosize: true, ...size, height: grown(place), uirevision: "kept", hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: small ? 9 : layout.scene ? 11 : 12, color: colour("@ink") },
      margin: layout.scene ? { l: 0, r: 0, t: 0, b: 0 } : { l: 56, r: 12, t: HOVERS ? 30 : 10, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("@muted"), activecolor: colour("@accent") },
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", maxheight: 4000 },
      hoverlabel: { bgcolor: colour("@raised"), bordercolor: colour("@rule"), font: { color: colour("@ink"), family } },
      // a finger on a chart scrolls the page
      dragmode: layout.scene ? "orbit" : HOVERS ? "zoom" : false,
    };
  }
  const config = (flat) => ({
    responsive: true, displaylogo: false, displayModeBar: HOVERS ? "hover" : false,
    modeBarButtons: [flat ? ["toImage", "zoom2d", "pan2d", "resetScale2d"] : ["toImage", "orbitRotation", "pan3d", "resetCameraDefault3d"]],
  });
  function paint(place, size = {}) {
    const figure = figures.get(place);
    place.classList.add("drawn");
    place.style.height = grown(place) + "px";
    return Plotly.react(place, tracesOf(place, figure), layoutOf(place, figure, size), config(!figure.layout.scene));
  }
  async function fitted(place) {
    heights.set(place, guessed(place, place.clientWidth));
    await paint(place);
    const more = needed(place);
    if (more === heights.get(place)) return;
    heights.set(place, more);
    await paint(place);
  }

  // The button switches between the themes; the choice is kept for the next visit
  function offerThemes(button) {
    const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    function kept(theme) {
      try { return theme === undefined ? localStorage.getItem("theme") : localStorage.setItem("theme", theme); } catch { return null; }
    }
    function retheme() {
      button.textContent = `Switch to the ${dark() ? "light" : "dark"} theme`;
      for (const place of figures.keys()) paint(place);
    }
    if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      kept(root.dataset.theme);
      retheme();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
    retheme();
  }

  return { offerThemes, figures, heights, colour, guessed, needed, paint, fitted, shrink };
})();
