// The page around the views: the choice of run, stage and step, of a view, and of light or dark. All but the data source is the same in the
// tab and in the file that opens offline.

import { compare } from "../views/compare.js";
import { element, select } from "../lib/dom.js";
import { messageOf } from "../lib/format.js";
import { exportMenu } from "./exports.js";
import { memory } from "../views/memory.js";
import { modules } from "../views/modules.js";
import { operators } from "../views/operators.js";
import { ranks } from "../views/ranks.js";
import { roofline } from "../views/roofline.js";
import { summary } from "../views/summary.js";
import { nearest, windowChoices } from "../lib/windows.js";

/** @type {View[]} */
const VIEWS = [summary, modules, operators, roofline, memory, ranks, compare];

/** @type {(source: Source, root: HTMLElement) => Promise<{ reload: () => Promise<void> }>} */
export async function open(source, root) {
  const [state, ofViews] = parsed(source.address.read(), source.open);
  const remember = () => source.address.write(written(state, ofViews));
  /** @type {Listed} */
  let listed = { windows: [], problems: [] };
  const main = element("main", { class: "view", tabindex: -1 });
  const choices = element("div", { class: "choices" });
  const rankChoice = element("div", { class: "choices" });
  const wholeRunNote = element("div", { class: "of-all", role: "note" });
  const title = element("h1", {}, "lflops");
  const views = element("div", { class: "views", role: "tablist", "aria-label": "views" });
  const problems = element("div", { class: "problems", role: "status" });
  /** @type {Payload | null} */
  let payload = null;
  /** @type {ProfileWindow | null} */
  let shown = null;
  let asked = 0;
  const menu = exportMenu(() => ({ payload, view: main }));
  root.replaceChildren(element("header", {}, title, choices, rankChoice, views, menu, themeChoice(state, remember)), problems, wholeRunNote, main);

  // A menu closes with Escape, or by a click outside of it.
  /** @type {(isKept: (menu: HTMLElement) => boolean) => void} */
  const close = (isKept) => { for (const each of root.querySelectorAll("details")) if (!isKept(each)) each.open = false; };
  root.addEventListener("keydown", ({ key }) => { if (key === "Escape") close(() => false); });
  root.addEventListener("click", ({ target }) => close((each) => target instanceof Node && each.contains(target)));

  function drawViews() {
    views.replaceChildren(...VIEWS.map(({ id, label }) => element("button", {
      type: "button", role: "tab", id: `tab-${id}`, "aria-selected": state.view === id, tabindex: state.view === id ? 0 : -1,
      onclick: () => choose(id), onkeydown: step,
    }, label)));
  }

  /** @type {(id: string, changes?: State) => void} */
  function go(id, changes = {}) {
    state.view = id;
    Object.assign(ofViews[id], changes);
    remember();
    draw();
  }

  /** @type {(id: string) => void} */
  function choose(id) {
    go(id);
    const chosen = [...views.querySelectorAll("button")].find((button) => button.id === `tab-${id}`);
    chosen?.focus();
  }

  /** @type {(event: KeyboardEvent) => void} */
  function step(event) {
    const move = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!move) return;
    const at = VIEWS.findIndex(({ id }) => id === state.view);
    choose(VIEWS[(at + move + VIEWS.length) % VIEWS.length].id);
  }

  function draw() {
    drawViews();
    if (payload === null || shown === null) return;
    title.textContent = payload.title;
    main.setAttribute("aria-labelledby", `tab-${state.view}`);
    main.setAttribute("role", "tabpanel");
    const view = VIEWS.find(({ id }) => id === state.view) ?? VIEWS[0];
    /** @type {number[]} */
    const ranks = payload.ranks ? payload.ranks.ranks.rank : [];
    const rank = ranks.find((each) => String(each) === state.rank) ?? null;
    const options = [["", "all"], ...ranks.map((each) => [String(each), String(each)])];
    const choose = select("rank", options, String(rank ?? ""), (value) => chooseRank(value === "" ? null : Number(value)));
    rankChoice.replaceChildren(...(ranks.length ? [choose] : []));
    const isOfAll = rank !== null && !view.ofOneRank;
    wholeRunNote.textContent = isOfAll ? "This is of the whole run: what is known of one rank by itself is in Summary and in Ranks." : "";
    main.replaceChildren(view.draw(payload, { state: ofViews[view.id], remember, go, source, listed, window: shown, rank, chooseRank }));
  }

  /** @type {(rank: number | null) => void} */
  function chooseRank(rank) {
    state.rank = String(rank ?? "");
    remember();
    draw();
  }

  /** @type {(text: string) => void} */
  function showMessage(text) {
    payload = null;
    shown = null;
    main.replaceChildren(element("p", { class: "message" }, text));
  }

  /** @type {(key: string, value: string) => void} */
  function pick(key, value) {
    state[key] = value;
    remember();
    show();
  }

  async function show() {
    const window = nearest(listed.windows, state);
    if (window === undefined) {
      choices.replaceChildren();
      showMessage("There is no window here yet: lflops.FlopsMonitor or lflops.tensorboard.log writes one.");
      return;
    }
    if (window.run !== null) choices.replaceChildren(...windowChoices(listed.windows, window, pick));
    if (JSON.stringify(shown) === JSON.stringify(window)) return; // what is open in it stays open
    asked += 1;
    const mine = asked;
    if (payload === null) showMessage("Loading…");
    try {
      const next = await source.read(window);
      if (mine !== asked) return;
      payload = next;
      shown = window;
      draw();
    } catch (error) {
      if (mine === asked) showMessage(`This window cannot be shown: ${messageOf(error)}`);
    }
  }

  async function reload() {
    try {
      listed = await source.list();
    } catch (error) {
      showMessage(`The windows cannot be listed: ${messageOf(error)}`);
      return;
    }
    problems.replaceChildren(...listed.problems.map((text) => element("p", { class: "doubt" }, text)));
    await show();
  }

  drawViews();
  showMessage("Loading…");
  await reload();
  return { reload };
}

/** @type {(state: State, remember: () => void) => HTMLElement} */
function themeChoice(state, remember) {
  /** @type {(theme: string) => void} */
  const apply = (theme) => {
    state.theme = theme;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  apply(state.theme);
  return select("", [["", "system's theme"], ["light", "light"], ["dark", "dark"]], state.theme, (theme) => { apply(theme); remember(); }, "theme");
}

// The state is kept in the address, so that a link shows what its sender saw: the page's own, and that of a view with its id and a dot.
/** @type {(text: string, first?: string) => [State, Record<string, State>]} */
function parsed(text, first = VIEWS[0].id) {
  /** @type {State} */
  const state = { theme: "" };
  /** @type {Record<string, State>} */
  const ofViews = Object.fromEntries(VIEWS.map(({ id }) => [id, {}]));
  for (const [name, value] of new URLSearchParams(text)) {
    const [view, key] = name.split(".");
    if (key === undefined) state[name] = value;
    else if (Object.hasOwn(ofViews, view)) ofViews[view][key] = value;
  }
  if (!Object.hasOwn(ofViews, state.view)) state.view = first;
  return [state, ofViews];
}

/** @type {(state: State, ofViews: Record<string, State>) => string} */
function written(state, ofViews) {
  const own = Object.entries(ofViews).flatMap(([view, state]) => Object.entries(state).map(([key, value]) => [`${view}.${key}`, value]));
  return String(new URLSearchParams([...Object.entries(state), ...own].filter(([, value]) => value)));
}
