"use strict";
const makeReadable = (() => {
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; document.body.append(tip);
  const text = (value) => {
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + unit;
    return String(+value.toPrecision(4));
  };
  const nearest = (values, at) => {
    let best = 0;
    values.forEach((value, index) => { if (Math.abs(value - at) < Math.abs(values[best] - at)) best = index; });
    return best;
  };
  const smoothed = (values, weight) => { // an exponential moving mean, corrected for its start
    let total = 0, share = 0;
    return values.map((value) => {
      if (value === null) return null;
      total = weight * total + (1 - weight) * value; share = weight * share + 1 - weight;
      return total / share;
    });
  };
  const addSmoothing = (chart, lines) => {
    const paths = [...chart.querySelectorAll(".line")].map((path) => [path,
      path.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(Number))]);
    const whole = lines.map((line) => line.y), slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 });
    slider.oninput = () => {
      const weight = Number(slider.value);
      for (const [path, points] of paths) {
        const y = smoothed(points.map((point) => point[1]), weight);
        path.setAttribute("d", "M" + points.map((point, index) => `${point[0]} ${y[index].toFixed(1)}`).join("L"));
      }
      lines.forEach((line, index) => { line.y = line.low = line.high = smoothed(whole[index], weight); });
    };
    const label = document.createElement("label");
    label.className = "smoothing"; label.append("smoothing", slider); chart.prepend(label);
  };
  return (part) => { for (const chart of part.querySelectorAll(".chart")) {
    const data = JSON.parse(chart.dataset.lines), plot = chart.querySelector(".plot");
    const rule = document.createElement("div");
    rule.className = "rule"; rule.hidden = true; plot.append(rule);
    if ("smoothing" in chart.dataset) addSmoothing(chart, data.lines);
    let share = 1;
    const hide = () => { rule.hidden = tip.hidden = true; };
    const show = (top) => {
      const box = plot.getBoundingClientRect(), at = data.x[0] + (data.x[1] - data.x[0]) * share;
      rule.hidden = tip.hidden = false;
      rule.style.left = share * 100 + "%";
      tip.replaceChildren();
      const head = document.createElement("div");
      head.textContent = `${text(at)} ${data.across}`; tip.append(head);
      for (const line of data.lines) {
        const index = nearest(line.x, at), row = document.createElement("div"), mark = document.createElement("i");
        if (line.y[index] === null || at < line.x[0] || at > line.x[line.x.length - 1]) continue;
        mark.style.background = `var(--${line.colour})`;
        const range = line.low[index] < line.high[index] ? ` (${text(line.low[index])} to ${text(line.high[index])})` : "";
        row.append(mark, `${line.label}: ${text(line.y[index])}${range}`); tip.append(row);
      }
      const x = box.left + share * box.width, width = tip.offsetWidth;
      const left = x + 14 + width <= innerWidth - 8 ? x + 14 : x - 14 - width;
      tip.style.left = Math.max(8, Math.min(left, innerWidth - width - 8)) + "px";
      const below = innerWidth < 640 ? box.bottom + 8 : top; // on a narrow screen it would hide the lines
      tip.style.top = Math.max(8, Math.min(below, innerHeight - tip.offsetHeight - 8)) + "px";
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(event.clientY + 16);
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      share = Math.min(1, Math.max(0, share + step));
      show(plot.getBoundingClientRect().top + 16);
    });
  } };
})();
makeReadable(document);
