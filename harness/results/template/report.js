"use strict";
(() => {
  const read = (id) => {
    const element = document.getElementById(id);
    return element ? JSON.parse(element.textContent) : null;
  };

  // Sorting: numbers by value, empty cells last in either direction.
  const sortBy = (table, index, descending) => {
    const key = (row) => row.cells[index].dataset.key;
    const sign = descending ? -1 : 1;
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const p = Number(x), q = Number(y);
      const numbers = !Number.isNaN(p) && !Number.isNaN(q);
      return sign * (numbers ? (p > q) - (p < q) : x.localeCompare(y));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  };
  const table = document.getElementById("table");
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    head.firstElementChild.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((h) => h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, index, descending);
    });
  });

  // A link to a cell opens it.
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  const rows = read("chart-rows");
  const panels = read("chart-specs");
  if (!rows || !panels) return;

  // Okabe and Ito's colours, told apart by the colour-blind; the dark set is lightened.
  const light = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#6b6b6b"];
  const dark = ["#56b4e9", "#e69f00", "#2fbf94", "#e08fbf", "#f0e442", "#ff7f50", "#aaaaaa"];
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const config = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [ink, soft, line] = [colour("--ink"), colour("--soft"), colour("--line")];
    const palette = scheme.matches ? dark : light;
    return {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: line },
      line: { color: palette[0] },
      point: { color: palette[0] },
      range: { category: palette, ordinal: palette },
      axis: {
        labelColor: ink, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500,
      },
      legend: {
        orient: "bottom", direction: "horizontal", labelColor: ink, titleColor: ink,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, columns: 4,
        symbolStrokeWidth: 2, symbolBaseFillColor: ink, symbolBaseStrokeColor: ink,
      },
    };
  };
  const views = new Map();
  const draw = async (element, spec) => {
    const ticket = {};
    views.get(element)?.view?.finalize();
    views.set(element, ticket);
    const result = await vegaEmbed(element, { ...spec, datasets: { cells: rows } }, {
      mode: "vega-lite", actions: false, renderer: "svg", ast: true, config: config(),
    });
    // A later choice may have overtaken this one.
    if (views.get(element) === ticket) ticket.view = result.view;
    else result.view.finalize();
  };
  const show = (panel) => {
    const select = panel.querySelector("select");
    const choice = panels[panel.dataset.panel][select ? select.value : 0];
    panel.querySelector(".note").textContent = choice.note;
    panel.querySelectorAll(".plot").forEach((element, i) => {
      draw(element, choice.specs[i]).catch((error) => {
        element.textContent = "This chart could not be drawn: " + error.message;
        console.error(error);
      });
    });
  };
  const all = document.querySelectorAll(".panel");
  all.forEach((panel) => {
    panel.querySelector("select")?.addEventListener("change", () => show(panel));
    show(panel);
  });
  scheme.addEventListener("change", () => all.forEach(show));
})();
