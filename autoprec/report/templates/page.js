"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 760px)");
  const font = getComputedStyle(document.body).fontFamily;

  function template() {
    const ink = dark.matches ? "#e7ebf0" : "#1a1f27";
    const soft = dark.matches ? "#9aa6b5" : "#5b6573";
    const rule = dark.matches ? "#303946" : "#e3e7ec";
    const card = dark.matches ? "#1b2129" : "#ffffff";
    const axis = {
      automargin: true, gridcolor: rule, linecolor: rule, zeroline: false, tickcolor: rule, fixedrange: true,
      title: { standoff: 8, font: { color: soft, size: 12 } }, tickfont: { color: soft, size: 12 },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: font, color: ink, size: 13 },
        margin: { l: 8, r: 12, t: 8, b: 8 }, xaxis: axis, yaxis: axis, hovermode: "closest", dragmode: false,
        hoverlabel: { bgcolor: card, bordercolor: rule, font: { color: ink, family: font }, align: "left" },
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 } },
      },
    };
  }

  // lines of marks are drawn in the colour of the ink, so that they show on dark paper as well
  function draw() {
    figures.forEach(function (figure, index) {
      const layout = Object.assign({}, figure.layout, { template: template() });
      if (narrow.matches && layout.yaxis && layout.yaxis.ticktext) {
        layout.yaxis = Object.assign({}, layout.yaxis, { tickfont: { size: 10 } });
      }
      Plotly.react("figure-" + index, figure.data, layout, { displayModeBar: false, responsive: true });
    });
  }

  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);

  document.querySelectorAll(".code").forEach(function (block) {
    const button = block.querySelector(".copy");
    if (!navigator.clipboard) { return; }
    button.hidden = false;
    button.addEventListener("click", function () {
      navigator.clipboard.writeText(block.querySelector("pre").textContent).then(
        function () { button.textContent = "Copied"; setTimeout(function () { button.textContent = "Copy"; }, 1500); },
        function () { button.textContent = "Not allowed here"; }
      );
    });
  });
}());
