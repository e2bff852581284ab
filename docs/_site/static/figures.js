// Draws the figures of the executed notebooks with the site's own copy of Plotly, which only pages with figures load.
// (A chart library from elsewhere would need a network.)
const plotly = new URL("plotly-basic.min.js", document.currentScript.src).href;

function draw() {
  const places = document.querySelectorAll(".nbgpu-figure");
  if (!places.length) return;
  const script = document.createElement("script");
  script.src = plotly;
  script.onload = () => {
    for (const place of places) {
      const { data, layout, config } = JSON.parse(place.querySelector("script").textContent);
      place.replaceChildren();
      Plotly.newPlot(place, data, layout, { responsive: true, displaylogo: false, ...config });
    }
  };
  script.onerror = () => {
    for (const place of places) place.textContent = "The figure cannot be drawn: " + plotly + " is missing.";
  };
  document.head.append(script);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", draw);
else draw();
