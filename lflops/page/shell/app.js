// What stands around the views: which run, stage and step is looked at, the choice of a view, and light or dark. All but the data source is
// the same in the tab and in the file that opens offline. A source has `list()`, which gives {windows: [{run, tag, step}], problems: [text]}
// with the latest window last; `read(window)`, which gives the payload of one of them; `address`, which reads and writes a text that a
// link and a reload keep; and, if it is not the first one, the id of the view to `open` with.

import { compare } from "../views/compare.js";
import { element, select } from "../lib/dom.js";
import { exportMenu } from "./exports.js";
import { memory } from "../views/memory.js";
import { modules } from "../views/modules.js";
import { operators } from "../views/operators.js";
import { ranks } from "../views/ranks.js";
import { roofline } from "../views/roofline.js";
import { summary } from "../views/summary.js";
import { nearest, windowChoices } from "./windows.js";

// A view has an id, a label and `draw(payload, context)`, which gives its node. In the context are `state`, texts and truths of the view's
// own which the address keeps, `remember()` to be called when it changed, `go(id, changes)` to another view and its state, the source, what
// it `listed`, which `window` of that the payload is, and `rank`, the one that was chosen above the views, or null, with `chooseRank(rank)`.
// A view that shows one rank by itself says so as `ofOneRank`.
const VIEWS = [summary, modules, operators, roofline, memory, ranks, compare];

export async function open(source, root) {
  const [state, ofViews] = parsed(source.address.read(), source.open);
  const remember = () => source.address.write(written(state, ofViews));
  let listed = { windows: [], problems: [] };
  const place = element("main", { class: "place", tabindex: -1 });
  const choices = element("div", { class: "choices" });
  const rankChoice = element("div", { class: "choices" });
  const ofAll = element("div", { class: "of-all", role: "note" });
  const title = element("h1", {}, "lflops");
  const views = element("div", { class: "views", role: "tablist", "aria-label": "views" });
  const problems = element("div", { class: "problems", role: "status" });
  let payload = null;
  let shown = null;
  let asked = 0;
  const menu = exportMenu(() => ({ payload, place }));
  root.replaceChildren(element("header", {}, title, choices, rankChoice, views, menu, themeChoice(state, remember)), problems, ofAll, place);

  // What opens as a menu closes with Escape, or by a click beside it.
  const close = (isKept) => { for (const each of root.querySelectorAll("details[open]")) if (!isKept(each)) each.open = false; };
  root.addEventListener("keydown", ({ key }) => { if (key === "Escape") close(() => false); });
  root.addEventListener("click", ({ target }) => close((each) => each.contains(target)));

  function drawViews() {
    views.replaceChildren(...VIEWS.map(({ id, label }) => element("button", {
      type: "button", role: "tab", id: `tab-${id}`, "aria-selected": state.view === id, tabindex: state.view === id ? 0 : -1,
      onclick: () => choose(id), onkeydown: (event) => step(event),
    }, label)));
  }

  function go(id, changes = {}) {
    state.view = id;
    Object.assign(ofViews[id], changes);
    remember();
    draw();
  }

  function choose(id) {
    go(id);
    views.querySelector('[aria-selected="true"]').focus();
  }

  function step(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const at = VIEWS.findIndex(({ id }) => id === state.view);
    choose(VIEWS[(at + move + VIEWS.length) % VIEWS.length].id);
  }

  function draw() {
    drawViews();
    if (payload === null) return;
    title.textContent = payload.title;
    place.setAttribute("aria-labelledby", `tab-${state.view}`);
    place.setAttribute("role", "tabpanel");
    const view = VIEWS.find(({ id }) => id === state.view);
    const known = payload.ranks ? payload.ranks.ranks.rank : [];
    const rank = known.find((each) => String(each) === state.rank) ?? null;
    const options = [["", "all"], ...known.map((each) => [String(each), String(each)])];
    rankChoice.replaceChildren(...(known.length ? [select("rank", options, String(rank ?? ""), chooseRank)] : []));
    const isOfAll = rank !== null && !view.ofOneRank;
    ofAll.textContent = isOfAll ? "This is of the whole run: what is known of one rank by itself is in Summary and in Ranks." : "";
    place.replaceChildren(view.draw(payload, { state: ofViews[view.id], remember, go, source, listed, window: shown, rank, chooseRank }));
  }

  function chooseRank(rank) {
    state.rank = String(rank ?? "");
    remember();
    draw();
  }

  function say(text) {
    payload = null;
    shown = null;
    place.replaceChildren(element("p", { class: "message" }, text));
  }

  function pick(key, value) {
    state[key] = value;
    remember();
    show();
  }

  async function show() {
    const window = nearest(listed.windows, state);
    if (window === undefined) {
      choices.replaceChildren();
      say("There is no window here yet: lflops.FlopsMonitor or lflops.tensorboard.log writes one.");
      return;
    }
    if (window.run !== null) choices.replaceChildren(...windowChoices(listed.windows, window, pick));
    if (JSON.stringify(shown) === JSON.stringify(window)) return; // what is open in it stays open
    asked += 1;
    const mine = asked;
    if (payload === null) say("Loading…");
    try {
      const found = await source.read(window);
      if (mine !== asked) return;
      payload = found;
      shown = window;
      draw();
    } catch (error) {
      if (mine === asked) say(`This window cannot be shown: ${error.message}`);
    }
  }

  async function reload() {
    try {
      listed = await source.list();
    } catch (error) {
      say(`The windows cannot be listed: ${error.message}`);
      return;
    }
    problems.replaceChildren(...listed.problems.map((text) => element("p", { class: "doubt" }, text)));
    await show();
  }

  drawViews();
  say("Loading…");
  await reload();
  return { reload };
}

function themeChoice(state, remember) {
  const apply = (theme) => {
    state.theme = theme;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  apply(state.theme);
  return select("", [["", "system's theme"], ["light", "light"], ["dark", "dark"]], state.theme, (theme) => { apply(theme); remember(); }, "theme");
}

// The state is kept in the address, so that a link shows what its sender saw: the frame's own, and that of views by their id and a dot.
function parsed(text, first = VIEWS[0].id) {
  const state = { theme: "" };
  const ofViews = Object.fromEntries(VIEWS.map(({ id }) => [id, {}]));
  for (const [name, value] of new URLSearchParams(text)) {
    const [view, key] = name.split(".");
    if (key === undefined) state[name] = value;
    else if (Object.hasOwn(ofViews, view)) ofViews[view][key] = value;
  }
  if (!Object.hasOwn(ofViews, state.view)) state.view = first;
  return [state, ofViews];
}

function written(state, ofViews) {
  const own = Object.entries(ofViews).flatMap(([view, kept]) => Object.entries(kept).map(([key, value]) => [`${view}.${key}`, value]));
  return String(new URLSearchParams([...Object.entries(state), ...own].filter(([, value]) => value)));
}
