"use strict";
// Draw figures of foretrain.report.figure on canvases: zoom, hover, keyboard, dark mode, any width, no dependencies.
const Charts = (() => {
  const THEME = {"#0f172a": "--ink", "#64748b": "--grey", "#e2e8f0": "--line", "#ffffff": "--card",
    "#2563eb": "--blue", "#4377ee": "--blue2", "#ea580c": "--orange", "#f27d3e": "--orange2", "#cbd5e1": "--faint",
    "#94a3b8": "--soft", "#b91c1c": "--red", "#fed7aa": "--pale", "#475569": "--grey"};
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif';
  const DASHES = {dot: [2, 3], dash: [6, 4], solid: []};
  const theme = {}, all = new Set();
  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const [hex, name] of Object.entries(THEME)) theme[hex] = style.getPropertyValue(name).trim() || hex;
  }
  const paint = color => theme[color] || color || theme["#0f172a"];
  const at = (value, index) => Array.isArray(value) ? value[index] : value;
  const plain = text => String(text).replace(/<\/?b>/g, "");

  // Numbers as text: %{x:,.4g} and the like.
  function format(value, spec) {
    if (typeof value !== "number" || !spec) return value ?? "";
    const [, flags, digits, kind] = /^([+,]*)\.?(\d*)~?([gf]?)$/.exec(spec) || [];
    let text = kind === "f" ? value.toFixed(+digits) : String(Number(value.toPrecision(Math.max(+digits || 6, 1))));
    if (flags && flags.includes(",")) text = Number(text).toLocaleString("en");
    return flags && flags.includes("+") && value >= 0 ? "+" + text : text;
  }
  function hover(trace, index) {
    if (!trace.hovertemplate) return "";
    return trace.hovertemplate.replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}/g, (_, name, part, spec) => {
      let value = at(trace[name], index);
      if (part !== undefined) value = value[part];
      return format(value, spec);
    });
  }
  // <b> and <br> are markup, everything else is text: names come from scripts.
  function rich(node, text) {
    node.replaceChildren();
    let into = node;
    for (const part of String(text).split(/(<br>|<\/?b>)/)) {
      if (part === "<br>") into.append(document.createElement("br"));
      else if (part === "<b>") { into = document.createElement("b"); node.append(into); }
      else if (part === "</b>") into = node;
      else into.append(part);
    }
  }

  // Axes: forward maps a value to what is linear on the screen.
  const forward = (axis, value) => axis.log ? Math.log10(value) : axis.names ? axis.names.indexOf(value) : value;
  const numeric = (axis, value) => typeof value === "number" && axis.names ? value : forward(axis, value);
  function makeAxis(spec, values, lengths) {
    const axis = {spec, log: spec.type === "log"};
    if (spec.type === "category" || values.some(value => typeof value === "string"))
      axis.names = [...new Set(values.filter(value => value !== null))];
    let low = Infinity, high = -Infinity;
    const see = value => { if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); } };
    if (axis.names) { low = -0.5; high = axis.names.length - 0.5; }
    else if (spec.range) [low, high] = spec.range.map(value => forward(axis, value));
    else {
      for (const value of values) if (value !== null && value !== undefined) see(forward(axis, value));
      for (const value of lengths) see(value);
      if (!Number.isFinite(low)) { low = 0; high = 1; }
      const pad = (high - low || Math.abs(high) || 1) * 0.05;
      const zero = spec.rangemode === "tozero" && !axis.log && low >= 0;
      low = zero || lengths.length && low === 0 ? 0 : low - pad;
      high += pad;
    }
    if (spec.autorange === "reversed") [low, high] = [high, low];
    axis.full = [low, high];
    axis.view = [low, high];
    return axis;
  }
  function niceTicks(low, high, count) {
    const span = Math.abs(high - low) || 1, power = 10 ** Math.floor(Math.log10(span / count));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => span / s <= count) || power * 10;
    const found = [], least = Math.min(low, high), most = Math.max(low, high);
    for (let k = Math.ceil(least / step - 1e-9); k * step <= most + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
    return found;
  }
  const label = value => Math.abs(value) >= 1e4 ? value.toLocaleString("en") : String(Number(value.toPrecision(7)));
  function ticks(axis, count) {
    const [low, high] = axis.view, least = Math.min(low, high), most = Math.max(low, high);
    if (axis.names) return axis.names.map((name, k) => [k, String(name)]).filter(([k]) => k >= least && k <= most);
    const {tickvals, ticktext} = axis.spec;
    if (tickvals) {
      const fixed = tickvals.map((v, k) => [forward(axis, v), String(ticktext[k])]).filter(([v]) => v >= least && v <= most);
      if (fixed.length > 1 || axis.spec.fixedrange) return fixed;
    }
    if (!axis.log) return niceTicks(low, high, count).map(v => [v, label(v)]);
    if (most - least < 1) return niceTicks(10 ** least, 10 ** most, count).filter(v => v > 0).map(v => [Math.log10(v), label(v)]);
    const found = [];
    for (let p = Math.floor(least); p <= most; p++)
      for (const f of [1, 2, 5]) { const v = Math.log10(f) + p; if (v >= least && v <= most) found.push([v, label(+(f * 10 ** p).toPrecision(3))]); }
    return found;
  }

  class Chart {
    constructor(node, figure) {
      this.node = node;
      this.hidden = new Set();
      this.focus = null;
      node.classList.add("figure");
      node.replaceChildren();
      this.legend = element("div", "legend", node);
      this.canvas = element("canvas", "", node);
      this.canvas.setAttribute("aria-hidden", "true");
      this.tip = element("div", "tip", node);
      this.tip.hidden = true;
      this.said = element("div", "said", node);
      this.said.setAttribute("aria-live", "polite");
      node.setAttribute("role", "group");
      node.setAttribute("aria-roledescription", "chart");
      node.tabIndex = 0;
      this.listen();
      this.update(figure);
      all.add(this);
      this.size = new ResizeObserver(() => { if (node.clientWidth !== this.width) this.draw(); });
      this.size.observe(node);
    }

    // Show another figure in the same place; the zoom is kept only where `stay`.
    update(figure, stay) {
      const before = stay && this.panels ? this.panels.map(p => [p.x.view, p.x.full]) : null;
      this.figure = figure;
      this.focus = null;
      this.marks = null;
      this.prepare();
      if (before) this.panels.forEach((p, k) => {
        if (before[k] && before[k][0].join() !== before[k][1].join()) p.x.view = before[k][0];
      });
      this.describe();
      this.drawLegend();
      // The observer tells of another width; to read it here would lay out the page once a figure.
      this.draw(this.width);
    }
    traces() {
      return this.figure.data.filter(t => t.visible !== false && !this.hidden.has(t.legendgroup ?? t.name));
    }
    prepare() {
      const {layout} = this.figure, shown = this.traces(), grid = layout.grid;
      this.parallel = this.figure.data.find(t => t.type === "parcoords");
      this.panels = [];
      for (let k = 1; k <= grid.rows * grid.columns; k++) {
        const mine = shown.filter(t => t.panel === k), xs = [], ys = [], xl = [], yl = [], sums = new Map();
        for (const t of mine) {
          if (t.type === "bar") {
            t.at = t.x.map((length, i) => {
              if (t.base) return t.base[i];
              if (layout.barmode !== "stack") return 0;
              const row = at(t.y, i), base = sums.get(row) || 0;
              sums.set(row, base + length);
              return base;
            });
            t.x.forEach((length, i) => { if (length !== null) xl.push(t.at[i], t.at[i] + length); });
            ys.push(...(Array.isArray(t.y) ? t.y : [t.y]));
          } else if (t.x) { for (const v of t.x) xs.push(v); for (const v of t.y) ys.push(v); }
          if (t.error_y) t.y.forEach((v, i) => yl.push(v + t.error_y[i], v - t.error_y[i]));
        }
        this.panels.push({k, traces: mine, x: makeAxis(layout.xaxis[k], xs, xl), y: makeAxis(layout.yaxis[k], ys, yl)});
        const p = this.panels.at(-1);
        if (layout.barmode === "stack" || mine.some(t => t.type === "bar") && !layout.xaxis[k].range) p.x.full[0] = p.x.view[0] = Math.min(0, p.x.full[0]);
      }
    }
    describe() {
      const {layout} = this.figure, names = [...new Set(this.figure.data.map(t => t.name).filter(Boolean))];
      const heading = this.node.closest("section")?.querySelector("h2, h3")?.textContent || layout.title || "";
      const keys = this.parallel ? "" : " Arrow keys go from mark to mark, plus and minus zoom, 0 shows everything.";
      this.node.setAttribute("aria-label", `Chart: ${heading}. ${names.slice(0, 12).map(plain).join(", ")}.${keys}`);
    }
    drawLegend() {
      const seen = new Set(), entries = this.figure.data.filter(t => {
        const group = t.legendgroup ?? t.name, wanted = t.name && t.showlegend !== false && t.visible !== false && !seen.has(group);
        if (wanted) seen.add(group);
        return wanted;
      });
      // The same entries stay, and with them the keyboard's focus.
      const keys = JSON.stringify(entries.map(t => [t.name, t.legendgroup, t.mode, t.line, paint(at(t.marker?.color, 0) ?? t.line?.color), this.hidden.has(t.legendgroup ?? t.name)]));
      this.legend.hidden = seen.size < 2 || this.figure.layout.showlegend === false;
      if (keys === this.keys) return;
      this.keys = keys;
      this.legend.replaceChildren();
      for (const t of entries) {
        const group = t.legendgroup ?? t.name;
        const button = element("button", "", this.legend), key = element("i", "", button);
        button.type = "button";
        key.className = t.mode?.includes("lines") ? `stroke ${t.line?.dash || ""}` : "fill";
        key.style.setProperty("--key", paint(at(t.marker?.color, 0) ?? t.line?.color));
        button.append(plain(t.name));
        button.setAttribute("aria-pressed", String(!this.hidden.has(group)));
        button.title = "click: show or hide; double-click: alone";
        button.addEventListener("click", () => this.toggle(group));
        button.addEventListener("dblclick", () => this.alone(group, seen));
      }
    }
    toggle(group) {
      if (!this.hidden.delete(group)) this.hidden.add(group);
      this.redo();
    }
    alone(group, groups) {
      const others = [...groups].filter(one => one !== group), already = others.every(one => this.hidden.has(one));
      this.hidden = new Set(already ? [] : others);
      this.redo();
    }
    redo() {
      const index = [...this.legend.children].indexOf(document.activeElement), views = this.panels.map(p => [p.x.view, p.y.view, p.x.full]);
      this.prepare();
      this.panels.forEach((p, k) => { if (views[k][0].join() !== views[k][2].join()) p.x.view = views[k][0]; });
      this.drawLegend();
      if (index >= 0) this.legend.children[index].focus();
      this.draw();
    }

    draw(width = this.node.clientWidth) {
      const {layout} = this.figure, canvas = this.canvas;
      this.width = width;
      if (!this.width) return;
      let {rows, columns} = layout.grid, height = layout.height;
      if (columns > 1 && this.width < 340 * columns) {
        rows *= columns; height *= columns * 0.8; columns = 1;
      }
      const wide = this.parallel ? Math.max(this.width, 76 * this.parallel.dimensions.length) : this.width;
      const ratio = Math.min(devicePixelRatio || 1, 3);
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = wide + "px";
      canvas.style.height = height + "px";
      this.node.style.minHeight = "";
      const c = this.c = canvas.getContext("2d");
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      c.clearRect(0, 0, wide, height);
      c.font = FONT;
      this.tip.hidden = true;
      if (this.parallel) return parallelAxes(this, wide, height);
      const parts = layout.parts || Array(rows).fill(1), total = parts.reduce((a, b) => a + b, 0);
      let top = 0;
      for (let row = 0; row < rows; row++) {
        const tall = height * (parts[row] ?? 1) / (parts.length === rows ? total : rows);
        for (let column = 0; column < columns; column++) {
          const p = this.panels[row * columns + column];
          if (p) this.panel(p, column * this.width / columns, top, this.width / columns, tall);
        }
        top += tall;
      }
      if (this.focus) this.show(this.focus);
      if (this.drag) this.band();
    }
    panel(p, left, top, wide, tall) {
      const c = this.c, {x, y} = p, marks = this.figure.layout.marks.filter(m => m.panel === p.k);
      const title = this.figure.layout.titles?.[p.k - 1], labels = marks.some(m => m.label && m.x !== undefined);
      const hidden = x.spec.visible === false;
      const head = (title ? 22 : 0) + (labels ? 18 : 6), foot = hidden ? 8 : x.spec.title ? 42 : 22;
      const yticks = y.spec.visible === false ? [] : ticks(y, Math.max(2, (tall - head - foot) / 40));
      const most = Math.max(60, Math.min(wide * (wide < 500 ? 0.36 : 0.32), 320));
      let margin = 12;
      for (const [, text] of yticks) {
        c.font = text.startsWith("<b>") ? "600 " + FONT : FONT;
        margin = Math.max(margin, Math.min(most, c.measureText(plain(text)).width + 12));
      }
      margin += y.spec.title && yticks.length ? 18 : 0;
      p.box = {left: left + margin, top: top + head, right: left + wide - 14, bottom: top + tall - foot};
      const b = p.box;
      if (this.figure.layout.equal) equalise(p);
      p.px = v => b.left + (numeric(x, v) - x.view[0]) / (x.view[1] - x.view[0]) * (b.right - b.left);
      // Rows whose view runs from the last to the first stand with the first on top.
      p.py = v => b.bottom - (numeric(y, v) - y.view[0]) / (y.view[1] - y.view[0]) * (b.bottom - b.top);
      c.save();
      c.fillStyle = c.strokeStyle = theme["#64748b"];
      c.textBaseline = "middle";
      c.lineWidth = 1;
      if (title) { c.textAlign = "center"; c.fillText(fit(c, title, wide - 10), left + wide / 2, top + 12); }
      // Of the y axis.
      for (const [v, text] of yticks) {
        const py = Math.round(p.py(unmap(y, v))) + 0.5;
        if (py < b.top - 2 || py > b.bottom + 2) continue;
        if (!y.names && y.spec.showgrid !== false) stroke(c, theme["#e2e8f0"], [[b.left, py], [b.right, py]]);
        c.font = text.startsWith("<b>") ? "600 " + FONT : FONT;
        c.fillStyle = theme[text.startsWith("<b>") || y.names ? "#0f172a" : "#64748b"];
        c.textAlign = "right";
        c.fillText(fit(c, plain(text), margin - 10 - (y.spec.title ? 18 : 0)), b.left - 8, py);
      }
      c.font = FONT;
      c.fillStyle = theme["#64748b"];
      if (y.spec.title && yticks.length) {
        c.save(); c.translate(left + 8, (b.top + b.bottom) / 2); c.rotate(-Math.PI / 2); c.textAlign = "center";
        c.fillText(fit(c, y.spec.title, b.bottom - b.top), 0, 0); c.restore();
      }
      // Of the x axis.
      if (!hidden) {
        let free = -Infinity;
        c.textAlign = "center";
        for (const [v, text] of ticks(x, Math.max(2, (b.right - b.left) / 85))) {
          const px = Math.round(p.px(unmap(x, v))) + 0.5, half = c.measureText(text).width / 2;
          if (px < b.left - 1 || px > b.right + 1) continue;
          stroke(c, theme["#e2e8f0"], [[px, b.top], [px, b.bottom]]);
          if (px - half > free && px + half < left + wide) { c.fillText(text, px, b.bottom + 12); free = px + half + 8; }
        }
        if (x.spec.title) {
          // Under the middle of the axis, but inside the panel: where that is narrow, labels of rows take much of it.
          const text = fit(c, x.spec.title, wide), half = c.measureText(text).width / 2;
          c.fillText(text, Math.max(left + half, Math.min((b.left + b.right) / 2, left + wide - half)), b.bottom + 31);
        }
      }
      c.beginPath(); c.rect(b.left - 1, b.top, b.right - b.left + 2, b.bottom - b.top); c.save(); c.clip();
      for (const m of marks) if (m.x0 !== undefined) {
        c.globalAlpha = m.opacity; c.fillStyle = paint(m.color);
        c.fillRect(p.px(m.x0), b.top, Math.max(2, p.px(m.x1) - p.px(m.x0)), b.bottom - b.top); c.globalAlpha = 1;
      }
      const line = m => stroke(c, paint(m.color), m.x !== undefined ? [[p.px(m.x), b.top], [p.px(m.x), b.bottom]]
        : [[b.left, p.py(m.y)], [b.right, p.py(m.y)]], m.width || 1.2, m.dash);
      for (const m of marks) if (m.below) line(m);
      c.restore();
      c.save();
      c.beginPath(); c.rect(b.left - 1, b.top - 1, left + wide - b.left + 1, b.bottom - b.top + 2); c.clip();
      for (const t of p.traces) DRAW[t.type](this, p, t);
      c.beginPath();
      for (const m of marks) if (!m.below && m.x0 === undefined) line(m);
      c.restore();
      c.fillStyle = theme["#0f172a"];
      let taken = [];
      for (const m of marks) if (m.label && m.x !== undefined) {
        const px = p.px(m.x), size = c.measureText(m.label).width;
        if (px < b.left - 1 || px > b.right + 1) continue;
        let from = m.side === "left" ? px : m.side === "right" ? px - size : px - size / 2;
        from = Math.max(left, Math.min(from, left + wide - size));
        if (taken.some(([lo, hi]) => from < hi + 6 && from + size > lo - 6)) continue;
        taken.push([from, from + size]);
        c.textAlign = "left"; c.fillStyle = paint(m.color); c.fillText(m.label, from, b.top - 10);
      }
      c.restore();
    }

    // What lies under a point of the canvas.
    find(px, py) {
      for (const p of [...this.panels].reverse()) {
        const b = p.box;
        if (!b || px < b.left - 8 || px > b.right + 8 || py < b.top - 8 || py > b.bottom + 8) continue;
        let best = null;
        for (const t of p.traces) {
          if (!t.hovertemplate) continue;
          const n = t.type === "heatmap" ? 0 : t.x.length;
          for (let i = 0; i < n; i++) {
            const box = place(p, t, i);
            if (!box) continue;
            const dx = Math.max(box[0] - px, 0, px - box[1]), dy = Math.max(box[2] - py, 0, py - box[3]);
            const far = Math.hypot(dx, dy), reach = t.type === "bar" ? 2.5 : 12;
            if (far <= reach && (!best || far <= best.far)) best = {p, t, i, far};
          }
          if (t.type === "heatmap") t.z.forEach((row, r) => row.forEach((_, k) => {
            const box = place(p, t, r * row.length + k);
            if (px >= box[0] && px <= box[1] && py >= box[2] && py <= box[3]) best = {p, t, i: r * row.length + k, far: 0};
          }));
        }
        if (best) return best;
      }
      return null;
    }
    show(found) {
      const {p, t, i} = found, box = place(p, t, i);
      if (!box) return;
      rich(this.tip, t.type === "heatmap" ? heatHover(t, i) : hover(t, i));
      this.tip.hidden = false;
      const x = Math.min(Math.max((box[0] + box[1]) / 2, p.box.left), p.box.right), wide = this.tip.offsetWidth;
      this.tip.style.left = Math.max(0, Math.min(x - wide / 2, this.width - wide)) + "px";
      const y = this.canvas.offsetTop + box[2] - this.tip.offsetHeight - 8;
      this.tip.style.top = (y > 0 ? y : this.canvas.offsetTop + box[3] + 8) + "px";
    }
    zoom(p, axis, low, high) {
      const a = p[axis], before = a.view;
      a.view = [low, high];
      if (axis === "x" && this.figure.layout.shared) for (const other of this.panels) other.x.view = a.view;
      return before;
    }
    scale(p, factor, px, py) {
      for (const [axis, at_, low, high] of [["x", px, p.box.left, p.box.right], ["y", py, p.box.bottom, p.box.top]]) {
        const a = p[axis];
        if (a.spec.fixedrange || a.names) continue;
        const part = Math.min(Math.max((at_ - low) / (high - low), 0), 1), [from, to] = a.view;
        const middle = from + part * (to - from);
        this.zoom(p, axis, middle - (middle - from) * factor, middle + (to - middle) * factor);
      }
      this.draw();
    }
    reset() {
      for (const p of this.panels) { p.x.view = [...p.x.full]; p.y.view = [...p.y.full]; }
      this.draw();
    }
    where(event) {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }
    inside(px, py) {
      return this.panels.find(({box}) => box && px >= box.left && px <= box.right && py >= box.top && py <= box.bottom);
    }
    listen() {
      const canvas = this.canvas, move = () => this.figure.layout.dragmode === "pan";
      canvas.addEventListener("pointermove", event => {
        if (this.parallel) return;
        const [px, py] = this.where(event);
        if (this.drag) return this.dragging(px, py, move());
        this.focus = this.find(px, py);
        if (this.focus) this.show(this.focus); else this.tip.hidden = true;
      });
      canvas.addEventListener("pointerleave", () => { if (!this.drag) { this.focus = null; this.tip.hidden = true; } });
      canvas.addEventListener("pointerdown", event => {
        const [px, py] = this.where(event);
        if (this.parallel) return this.brush?.(event, px, py);
        const p = this.inside(px, py);
        if (!p || event.button || p.x.names && p.y.names) return;
        this.drag = {p, x: px, y: py, to: [px, py], views: [[...p.x.view], [...p.y.view]]};
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointerup", event => {
        const drag = this.drag;
        this.drag = null;
        if (!drag || move()) return;
        const [px, py] = drag.to, {p} = drag;
        if (Math.abs(px - drag.x) < 6 && Math.abs(py - drag.y) < 6) return;
        const back = (axis, v, low, high) => axis.view[0] + (v - low) / (high - low) * (axis.view[1] - axis.view[0]);
        if (Math.abs(px - drag.x) >= 6 && !p.x.names && !p.x.spec.fixedrange) {
          const ends = [drag.x, px].map(v => back(p.x, Math.min(Math.max(v, p.box.left), p.box.right), p.box.left, p.box.right)).sort((a, b) => a - b);
          this.zoom(p, "x", ...ends);
        }
        if (Math.abs(py - drag.y) >= 24 && !p.y.names && !p.y.spec.fixedrange && p.y.view[0] < p.y.view[1]) {
          const ends = [drag.y, py].map(v => back(p.y, Math.min(Math.max(v, p.box.top), p.box.bottom), p.box.bottom, p.box.top)).sort((a, b) => a - b);
          this.zoom(p, "y", ...ends);
        }
        this.draw();
      });
      canvas.addEventListener("dblclick", () => this.reset());
      canvas.addEventListener("wheel", event => {
        if (!move() && !event.ctrlKey) return;
        const [px, py] = this.where(event), p = this.inside(px, py);
        if (p) { event.preventDefault(); this.scale(p, event.deltaY > 0 ? 1.2 : 1 / 1.2, px, py); }
      }, {passive: false});
      this.node.addEventListener("keydown", event => this.key(event));
      this.node.addEventListener("blur", () => { this.tip.hidden = true; this.focus = null; });
    }
    dragging(px, py, pan) {
      const {drag} = this, {p} = drag;
      drag.to = [px, py];
      if (!pan) return this.draw();
      const dx = (px - drag.x) / (p.box.right - p.box.left), dy = (py - drag.y) / (p.box.bottom - p.box.top);
      const [x, y] = drag.views;
      if (!p.x.names) p.x.view = x.map(v => v - dx * (x[1] - x[0]));
      if (!p.y.names && !p.y.spec.fixedrange) p.y.view = y.map(v => v + dy * (y[1] - y[0]));
      this.draw();
    }
    band() {
      const {drag, c} = this, b = drag.p.box, [px, py] = drag.to;
      const flat = Math.abs(py - drag.y) < 24 || drag.p.y.spec.fixedrange || drag.p.y.names || drag.p.y.view[0] > drag.p.y.view[1];
      c.fillStyle = paint("#2563eb"); c.globalAlpha = 0.15;
      c.fillRect(Math.min(drag.x, px), flat ? b.top : Math.min(drag.y, py), Math.abs(px - drag.x), flat ? b.bottom - b.top : Math.abs(py - drag.y));
      c.globalAlpha = 1;
    }
    key(event) {
      if (event.target !== this.node || this.parallel || event.ctrlKey || event.metaKey || event.altKey) return;
      const p = this.focus?.p || this.panels[0], middle = this.focus && place(this.focus.p, this.focus.t, this.focus.i);
      const px = middle ? (middle[0] + middle[1]) / 2 : (p.box.left + p.box.right) / 2;
      const py = middle ? (middle[2] + middle[3]) / 2 : (p.box.top + p.box.bottom) / 2;
      const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: "next", ArrowUp: "last"}[event.key];
      if (step) this.walk(step);
      else if (event.key === "+" || event.key === "=") this.scale(p, 1 / 1.5, px, py);
      else if (event.key === "-") this.scale(p, 1.5, px, py);
      else if (event.key === "0") this.reset();
      else if (event.key === "Escape") { this.focus = null; this.tip.hidden = true; }
      else return;
      event.preventDefault();
    }
    walk(step) {
      const list = [];
      for (const p of this.panels) for (const t of p.traces) if (t.hovertemplate) {
        const n = t.type === "heatmap" ? t.z.length * t.z[0].length : t.x.length;
        if (n) list.push({p, t, n});
      }
      if (!list.length) return;
      let k = this.focus ? list.findIndex(one => one.t === this.focus.t) : -1, i = this.focus ? this.focus.i : -1;
      if (k < 0) { k = 0; i = 0; }
      else if (typeof step === "string") { k = (k + (step === "next" ? 1 : list.length - 1)) % list.length; i = Math.min(i, list[k].n - 1); }
      else if (i + step < 0 || i + step >= list[k].n) { k = (k + step + list.length) % list.length; i = step > 0 ? 0 : list[k].n - 1; }
      else i += step;
      this.focus = {p: list[k].p, t: list[k].t, i};
      this.show(this.focus);
      this.said.textContent = this.tip.innerText.replace(/\n/g, ", ");
    }
  }

  const unmap = (axis, v) => axis.log ? 10 ** v : v;
  function element(tag, name, parent) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    parent.append(made);
    return made;
  }
  function fit(c, text, room) {
    if (c.measureText(text).width <= room) return text;
    let keep = text.length;
    while (keep > 1 && c.measureText(text.slice(0, keep) + "…").width > room) keep--;
    return text.slice(0, keep) + "…";
  }
  function stroke(c, color, points, width = 1, dash = "solid") {
    c.strokeStyle = color; c.lineWidth = width; c.setLineDash(DASHES[dash] || []);
    c.beginPath(); points.forEach(([x, y], k) => k ? c.lineTo(x, y) : c.moveTo(x, y)); c.stroke(); c.setLineDash([]);
  }
  // One unit is as long on both axes: a ring is round and stands in the middle.
  function equalise(p) {
    const b = p.box, {x, y} = p;
    if (x.view !== x.fitted) {
      const unit = Math.max((x.view[1] - x.view[0]) / (b.right - b.left), (y.view[1] - y.view[0]) / (b.bottom - b.top));
      for (const [axis, room] of [[x, b.right - b.left], [y, b.bottom - b.top]]) {
        const middle = (axis.view[0] + axis.view[1]) / 2;
        axis.view = [middle - unit * room / 2, middle + unit * room / 2];
      }
      x.fitted = x.view;
    }
  }
  // The box of mark `i` on the canvas: left, right, top, bottom.
  function place(p, t, i) {
    if (t.type === "heatmap") {
      const wide = t.z[0].length, r = Math.floor(i / wide), k = i % wide;
      return [p.px(k - 0.49), p.px(k + 0.49), ...[p.py(r - 0.47), p.py(r + 0.47)].sort((a, b) => a - b)];
    }
    const x = t.x[i], y = at(t.y, i);
    if (x === null || y === null) return null;
    if (t.type === "bar") {
      const row = numeric(p.y, y), half = (t.width ?? 0.68) / 2;
      const left = p.px(t.at[i]), right = p.px(t.at[i] + x);
      return [left, right, ...[p.py(row - half), p.py(row + half)].sort((a, b) => a - b)];
    }
    const px = p.px(x), py = p.py(y);
    return [px, px, py, py];
  }
  const heatHover = (t, i) => {
    const wide = t.z[0].length, r = Math.floor(i / wide), k = i % wide;
    return hover({...t, x: t.x[k], y: t.y[r], text: t.text[r][k], customdata: t.customdata?.[r][k], z: t.z[r][k]}, 0);
  };

  const DRAW = {
    bar(chart, p, t) {
      const c = chart.c, color = t.marker.color, shades = t.marker.shades?.map(paint);
      const height = chart.figure.layout.height;
      for (let i = 0; i < t.x.length; i++) {
        if (t.x[i] === null) continue;
        const [left, right, top, bottom] = place(p, t, i);
        if (right < p.box.left || left > p.box.right) continue;
        c.fillStyle = shades ? shades[i % 2] : paint(at(color, i));
        c.fillRect(left, top, Math.max(right - left, 0.6), Math.max(bottom - top, 1));
        const error = t.error_x;
        if (error) {
          const y = (top + bottom) / 2, end = t.at[i] + t.x[i], low = p.px(end - error.minus[i]), high = p.px(end + error.plus[i]);
          stroke(c, theme["#0f172a"], [[low, y], [high, y]], 1.3);
          for (const px of [low, high]) stroke(c, theme["#0f172a"], [[px, y - 4], [px, y + 4]], 1.3);
        }
        if (t.text?.[i]) {
          const size = c.measureText(t.text[i]).width, y = (top + bottom) / 2, outside = right + 6 + size <= p.box.right + 14;
          c.fillStyle = outside ? theme["#0f172a"] : "#ffffff"; c.textAlign = outside ? "left" : "right"; c.textBaseline = "middle";
          c.fillText(t.text[i], outside ? right + 6 : right - 6, y);
        }
      }
    },
    scatter(chart, p, t) {
      const c = chart.c, mode = t.mode || "lines";
      if (mode.includes("lines")) {
        c.strokeStyle = paint(t.line.color); c.lineWidth = t.line.width ?? 1.5; c.setLineDash(DASHES[t.line.dash] || []);
        c.beginPath();
        let pen = false, last = 0;
        for (let i = 0; i < t.x.length; i++) {
          if (t.x[i] === null || t.y[i] === null) { pen = false; continue; }
          const px = p.px(t.x[i]), py = p.py(t.y[i]);
          if (!pen) c.moveTo(px, py);
          else { if (t.line.shape === "hv") c.lineTo(px, last); c.lineTo(px, py); }
          pen = true; last = py;
        }
        c.stroke(); c.setLineDash([]);
      }
      const named = [];
      for (let i = 0; i < t.x.length; i++) {
        if (t.x[i] === null || t.y[i] === null) continue;
        const px = p.px(t.x[i]), py = p.py(t.y[i]);
        if (px < p.box.left - 20 || px > p.box.right + 20) continue;
        if (t.error_y) {
          const low = p.py(t.y[i] - t.error_y[i]), high = p.py(t.y[i] + t.error_y[i]);
          stroke(c, theme["#64748b"], [[px, low], [px, high]], 1.3);
          for (const y of [low, high]) stroke(c, theme["#64748b"], [[px - 4, y], [px + 4, y]], 1.3);
        }
        if (mode.includes("markers")) marker(c, px, py, t.marker || {}, i, t.line);
        if (mode.includes("text") && t.text[i]) {
          c.fillStyle = paint(t.textcolor || "#64748b"); c.font = FONT.replace("12px", (t.textsize || 11) + "px"); c.textAlign = "center"; c.textBaseline = "middle";
          const down = {"bottom center": 13, "top center": -15}[at(t.textposition, i)] || 0;
          const half = c.measureText(t.text[i]).width / 2 + 2;
          // A name that would cover another is left out; lines that cross behind one leave it readable.
          if (!named.some(([x, y, w]) => Math.abs(px - x) < half + w && Math.abs(py + down - y) < 12)) {
            named.push([px, py + down, half]);
            c.lineWidth = 3; c.lineJoin = "round"; c.strokeStyle = theme["#ffffff"]; c.strokeText(t.text[i], px, py + down);
            c.fillText(t.text[i], px, py + down);
          }
          c.font = FONT;
        }
      }
    },
    heatmap(chart, p, t) {
      const c = chart.c, values = t.z.flat().filter(v => v !== null), low = Math.min(...values), high = Math.max(...values);
      c.textBaseline = "middle"; c.textAlign = "center";
      t.z.forEach((row, r) => row.forEach((value, k) => {
        const [left, right, top, bottom] = place(p, t, r * row.length + k), part = (value - low) / (high - low || 1);
        c.fillStyle = `color-mix(in srgb, ${paint("#2563eb")} ${Math.round(8 + 80 * part)}%, ${theme["#ffffff"]})`;
        c.fillRect(left, top, right - left, bottom - top);
        c.fillStyle = part > 0.5 ? "#ffffff" : theme["#0f172a"];
        c.fillText(fit(c, t.text[r][k], right - left - 4), (left + right) / 2, (top + bottom) / 2);
      }));
    },
  };
  function marker(c, x, y, style, i, line) {
    const size = at(style.size, i) || 6, color = paint(at(style.color, i) ?? line?.color), h = size / 2;
    c.globalAlpha = style.opacity ?? 1; c.fillStyle = c.strokeStyle = color;
    c.beginPath();
    if (style.symbol === "square") c.rect(x - h, y - h, size, size);
    else if (style.symbol === "diamond-open") { c.moveTo(x, y - h); c.lineTo(x + h, y); c.lineTo(x, y + h); c.lineTo(x - h, y); c.closePath(); }
    else c.arc(x, y, h, 0, 2 * Math.PI);
    if (style.symbol === "diamond-open") { c.lineWidth = 2; c.stroke(); } else c.fill();
    const edge = at(style.edge, i);
    if (edge) { c.lineWidth = 3; c.strokeStyle = paint(edge); c.stroke(); }
    c.globalAlpha = 1;
  }

  // Parallel axes: a line a row, a drag along an axis keeps what crosses that part, a click on it keeps everything.
  function parallelAxes(chart, wide, tall) {
    const t = chart.parallel, c = chart.c, top = 52, bottom = tall - 14, n = t.dimensions.length;
    const spot = k => 44 + k * (wide - 88) / Math.max(n - 1, 1);
    const ends = t.dimensions.map(d => { const all_ = d.values.concat(d.tickvals); return [Math.min(...all_), Math.max(...all_)]; });
    const height = (k, v) => bottom - (v - ends[k][0]) / (ends[k][1] - ends[k][0] || 1) * (bottom - top);
    const kept = chart.kept ||= {}, rows = t.dimensions[0]?.values.length || 0;
    const passes = i => Object.entries(kept).every(([k, [low, high]]) => { const y = height(+k, t.dimensions[k].values[i]); return y >= low && y <= high; });
    for (const inside of [false, true]) for (let i = 0; i < rows; i++) if (passes(i) === inside) {
      const part = Math.min(t.color[i] / t.most, 1);
      c.strokeStyle = inside ? `color-mix(in srgb, ${paint("#2563eb")} ${Math.round(100 - 70 * part)}%, ${paint("#ea580c")})` : theme["#e2e8f0"];
      c.globalAlpha = Math.min(1, Math.max(0.04, 150 / rows)); c.lineWidth = 1; c.beginPath();
      for (let k = 0; k < n; k++) { const y = height(k, t.dimensions[k].values[i]); k ? c.lineTo(spot(k), y) : c.moveTo(spot(k), y); }
      c.stroke();
    }
    c.globalAlpha = 1; c.textBaseline = "middle";
    t.dimensions.forEach((d, k) => {
      stroke(c, theme["#64748b"], [[spot(k), top], [spot(k), bottom]]);
      c.fillStyle = theme["#0f172a"]; c.textAlign = "center"; c.font = "600 11px system-ui";
      const words = d.label.split(" "), half = Math.ceil(words.length / 2);
      [words.slice(0, half), words.slice(half)].forEach((line, j) => c.fillText(line.join(" "), spot(k), 12 + 14 * j));
      c.font = "10px system-ui"; c.textAlign = k === n - 1 ? "right" : "left";
      d.tickvals.forEach((v, j) => {
        const text = fit(c, d.ticktext[j], (wide - 88) / Math.max(n - 1, 1) - 10), x = spot(k) + (k === n - 1 ? -5 : 5);
        c.lineWidth = 3; c.strokeStyle = theme["#ffffff"]; c.strokeText(text, x, height(k, v)); c.fillText(text, x, height(k, v));
      });
      if (kept[k]) { c.globalAlpha = 0.3; c.fillStyle = paint("#ea580c"); c.fillRect(spot(k) - 6, kept[k][0], 12, kept[k][1] - kept[k][0]); c.globalAlpha = 1; }
    });
    c.font = FONT;
    chart.brush = (event, px, py) => {
      const k = t.dimensions.findIndex((_, j) => Math.abs(spot(j) - px) < 24);
      if (k < 0) return;
      delete kept[k];
      const follow = next => { const y = chart.where(next)[1]; if (Math.abs(y - py) > 4) kept[k] = [Math.min(py, y), Math.max(py, y)]; chart.draw(); };
      const stop = () => { removeEventListener("pointermove", follow); removeEventListener("pointerup", stop); chart.draw(); };
      addEventListener("pointermove", follow); addEventListener("pointerup", stop);
    };
  }

  async function read(name) {
    const holder = document.getElementById(name + "-data");
    if (holder.type === "application/json") return JSON.parse(holder.textContent);
    const bytes = Uint8Array.from(atob(holder.textContent), one => one.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }
  // Rows of the lanes follow from which schedules are shown; see `lanes` in foretrain.report.timeline_plot.
  function arrange(figure, shown) {
    const {blocks, ends, row, around} = figure.layout.meta, tops = [], values = [], texts = [];
    let top = 0;
    blocks.forEach((labels, run) => {
      tops.push(top);
      if (!shown[run]) return;
      labels.forEach((text, offset) => { values.push(top + offset); texts.push(text); });
      top += labels.length;
    });
    for (const trace of figure.data) if (trace.meta) {
      trace.visible = shown[trace.meta.run];
      trace.y = tops[trace.meta.run] + trace.meta.offset;
    }
    Object.assign(figure.layout.yaxis[1], {tickvals: values, ticktext: texts, range: [Math.max(top, 1) - 0.4, -0.5]});
    figure.layout.height = row * top + around;
    figure.layout.xaxis[1].range = [0, Math.max(...ends.filter((_, run) => shown[run]))];
  }
  function choose(chart, group) {
    const buttons = [...group.querySelectorAll("button")], on = b => b.getAttribute("aria-pressed") === "true";
    for (const button of buttons) button.addEventListener("click", () => {
      if (on(button) && buttons.filter(on).length === 1) return;
      button.setAttribute("aria-pressed", String(!on(button)));
      arrange(chart.figure, buttons.map(on));
      chart.update(chart.figure, true);
    });
  }
  async function make(node) {
    node.chart = new Chart(node, await read(node.id));
    const group = document.getElementById("chips");
    if (node.id === "lanes" && group) choose(node.chart, group);
  }
  // Whoever asks for a figure that is being made waits for it, too.
  const start = node => node.chart || (node.starting ??= make(node));
  readTheme();
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => { readTheme(); for (const chart of all) { chart.drawLegend(); chart.draw(); } });
  const watch = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); start(entry.target); }
  }, {rootMargin: "600px"});
  for (const node of document.querySelectorAll(".figure[id]")) if (document.getElementById(node.id + "-data")) watch.observe(node);
  addEventListener("beforeprint", () => { for (const node of document.querySelectorAll(".figure[id]")) start(node); });
  document.addEventListener("click", async event => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const text = button.dataset.copy;
    button.dataset.label ??= button.textContent;  // of a second click, too
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(button.previousElementSibling); button.textContent = "selected"; }
    setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
  });
  return {
    show(node, figure, stay) { if (node.chart) node.chart.update(figure, stay); else node.chart = new Chart(node, figure); return node.chart; },
    start: () => Promise.all([...document.querySelectorAll(".figure[id]")].map(start)),
  };
})();
