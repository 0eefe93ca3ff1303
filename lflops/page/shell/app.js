// The page around the views: the choice of window, rank and view, links, and light or dark. The tab in TensorBoard and the offline file differ
// only in their data source.

import { compare } from "../views/compare.js";
import { element, select } from "../lib/dom.js";
import { messageOf } from "../lib/format.js";
import { exportMenu } from "./exports.js";
import { gridOf } from "../table/virtual_table.js";
import { memory } from "../views/memory.js";
import { modules } from "../views/modules.js";
import { operators } from "../views/operators.js";
import { ranks } from "../views/ranks.js";
import { roofline } from "../views/roofline.js";
import { run } from "../views/run.js";
import { runs } from "../views/runs.js";
import { timeline } from "../views/timeline.js";
import { isSameWindow, nearest, windowChoices, windowStep } from "../lib/windows.js";

/** @type {View[]} */
const VIEWS = [run, modules, operators, roofline, timeline, memory, ranks, compare, runs];
const SCROLLING = ["PageDown", "PageUp", " ", "Home", "End"];

/** @type {(source: Source, root: HTMLElement) => Promise<{ reload: () => Promise<void> }>} */
export async function open(source, root) {
  let [state, ofViews] = parsed(source.address.read(), source.open);
  /** @type {Listed} */
  let listed = { windows: [], problems: [] };
  const panel = element("div", { class: "panel", role: "tabpanel" });
  const main = element("main", { class: "view", tabindex: 0, "aria-label": "view" }, panel);
  const choices = element("div", { class: "choices" });
  const rankChoice = element("div", { class: "choices" });
  const wholeRunNote = element("div", { class: "of-all", role: "note" });
  const title = element("h1", {}, "lflops");
  const when = element("span", { class: "quiet" });
  const views = element("div", { class: "views", role: "tablist", "aria-label": "views" });
  const within = element("div", { class: "views within-view", role: "tablist", "aria-label": "parts of the view" });
  const news = element("div", { class: "news", role: "status" });
  const problems = element("div", { class: "problems", role: "status" });
  /** @type {Payload | null} */
  let payload = null;
  /** @type {ProfileWindow | null} */
  let shown = null;
  let requests = 0;
  /** @type {((windows: ProfileWindow[]) => void) | null} */
  let follower = null;
  const tools = element("div", { class: "tools" }, copyLink(source), exportMenu(() => ({ payload, view: main })));
  if (!source.hasTheme) tools.append(themeChoice(state, () => remember()));
  root.replaceChildren(
    element("header", {}, element("div", { class: "bar" }, title, when, choices, rankChoice, tools), views, within), problems, news, wholeRunNote, main,
  );

  // The address keeps the state. Another view or window is a new entry in the browser's history; other changes replace the last entry.
  /** @type {(isStep?: boolean) => void} */
  function remember(isStep = false) {
    source.address.write(written(state, ofViews), isStep);
  }

  // A menu closes with Escape, or with a click outside it.
  /** @type {(isKept: (menu: HTMLElement) => boolean) => void} */
  const close = (isKept) => { for (const each of root.querySelectorAll("details")) if (!isKept(each)) each.open = false; };
  root.addEventListener("keydown", ({ key }) => { if (key === "Escape") close(() => false); });
  root.addEventListener("click", ({ target }) => close((each) => target instanceof Node && each.contains(target)));
  document.addEventListener("keydown", (event) => {
    const isElsewhere = event.target === document.body || (event.target instanceof Element && views.contains(event.target));
    if (isElsewhere && SCROLLING.includes(event.key) && !event.defaultPrevented && scrolled(main, event)) event.preventDefault();
  });
  source.address.onback(() => {
    [state, ofViews] = parsed(source.address.read(), source.open);
    const window = nearest(listed.windows, state);
    if (window && !(shown && isSameWindow(shown, window))) show();
    else draw();
  });

  // The views that have something to show.
  const known = () => VIEWS.filter(({ has }) => payload === null || !has || has(payload, listed));
  /** @type {() => View} */
  const current = () => known().find(({ id }) => id === state.view) ?? VIEWS[0];
  /** @type {(view: View) => string} */
  const topOf = ({ id, within: top }) => top ?? id;

  function drawViews() {
    const top = topOf(current());
    const ofTop = known().filter((view) => topOf(view) === top);
    drawTabs(views, known().filter((view) => !view.within || !known().some(({ id }) => id === view.within)), ({ id }) => id === top);
    drawTabs(within, ofTop.length > 1 ? ofTop : [], ({ id }) => id === current().id);
    within.hidden = ofTop.length < 2;
  }

  /** @type {(list: HTMLElement, shown: View[], isChosen: (view: View) => boolean) => void} */
  function drawTabs(list, shown, isChosen) {
    list.replaceChildren(...shown.map((view) => element("button", {
      type: "button", role: "tab", id: list === views ? `tab-${view.id}` : `part-${view.id}`, "aria-selected": isChosen(view), tabindex: isChosen(view) ? 0 : -1,
      onclick: () => choose(view.id, list), onkeydown: (/** @type {KeyboardEvent} */ event) => step(event, list, shown, shown.findIndex(isChosen)),
    }, list === views ? view.label : view.part ?? view.label)));
    const chosen = list.querySelector("[aria-selected=true]");
    if (chosen instanceof HTMLElement) list.scrollLeft = chosen.offsetLeft - list.offsetLeft - 40; // the tabs scroll on a narrow page
  }

  /** @type {(id: string, changes?: State) => void} */
  function go(id, changes = {}) {
    const isStep = state.view !== id;
    state.view = id;
    Object.assign(ofViews[id], changes);
    remember(isStep);
    draw();
    main.scrollTop = 0;
  }

  /** @type {(id: string, list: HTMLElement) => void} */
  function choose(id, list) {
    go(id);
    const chosen = list.querySelector("[aria-selected=true]");
    if (chosen instanceof HTMLElement) chosen.focus();
  }

  /** @type {(event: KeyboardEvent, list: HTMLElement, shown: View[], at: number) => void} */
  function step(event, list, shown, at) {
    /** @type {Record<string, number>} */
    const targets = { ArrowRight: at + 1, ArrowLeft: at - 1 + shown.length, Home: 0, End: shown.length - 1 };
    if (!(event.key in targets)) return;
    event.preventDefault();
    choose(shown[targets[event.key] % shown.length].id, list);
  }

  function draw() {
    drawViews();
    if (payload === null || shown === null) return;
    title.textContent = payload.title;
    const view = current();
    panel.setAttribute("aria-labelledby", `tab-${topOf(view)}`);
    /** @type {number[]} */
    const ranks = payload.ranks ? payload.ranks.ranks.rank : [];
    const rank = ranks.find((each) => String(each) === state.rank) ?? null;
    const options = [["", "all"], ...ranks.map((each) => [String(each), String(each)])];
    const choose = select("rank", options, String(rank ?? ""), (value) => chooseRank(value === "" ? null : Number(value)));
    rankChoice.replaceChildren(...(ranks.length ? [choose] : []));
    const isOfAll = rank !== null && !view.ofOneRank;
    wholeRunNote.textContent = isOfAll ? "This view shows the whole run. The views Run, Timeline and Ranks can show a single rank." : "";
    follower = null;
    panel.replaceChildren(view.draw(payload, {
      state: ofViews[view.id], remember: () => remember(), go, source, listed, window: shown, rank, chooseRank, showWindow,
      follow: (act) => { follower = act; },
    }));
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
    panel.replaceChildren(element("p", { class: "message" }, text));
  }

  // Show a window, in the view with this id.
  /** @type {(window: ProfileWindow, id?: string) => void} */
  function showWindow({ run, tag, step }, id = state.view) {
    Object.assign(state, { run, tag, step: String(step), view: id });
    remember(true);
    show();
  }

  /** @type {(key: string, value: string) => void} */
  function pick(key, value) {
    state[key] = value;
    remember(true);
    show();
  }

  function drawChoices() {
    const hasChoice = shown !== null && shown.run !== null;
    choices.replaceChildren(...(hasChoice ? windowChoices(listed.windows, /** @type {ProfileWindow} */ (shown), pick) : []));
    when.textContent = shown === null || hasChoice ? "" : shown.head?.when ?? "";
  }

  async function show() {
    const window = nearest(listed.windows, state);
    if (window === undefined) {
      choices.replaceChildren();
      showMessage("There is no window yet. lflops.FlopsMonitor and lflops.tensorboard.log write windows.");
      return;
    }
    if (shown !== null && isSameWindow(shown, window) && shown.wall_time === window.wall_time) { // opened rows stay open
      shown = window;
      draw();
      return;
    }
    requests += 1;
    const mine = requests;
    if (payload === null) showMessage("Loading…");
    try {
      const next = await source.read(window);
      if (mine !== requests) return;
      payload = next;
      shown = window;
      if (window.run !== null) Object.assign(state, { run: String(window.run), tag: String(window.tag), step: String(window.step) });
      news.replaceChildren();
      drawChoices();
      draw();
    } catch (error) {
      if (mine === requests) showMessage(`This window cannot be shown: ${messageOf(error)}`);
    }
  }

  // A new window is offered, but never shown automatically.
  /** @type {(window: ProfileWindow) => void} */
  function offer(window) {
    const of = shown?.run === window.run ? "" : ` of run ${window.run}`;
    news.replaceChildren(
      element("span", {}, `New window at step ${windowStep(window, listed.windows)}${of}`),
      element("button", { type: "button", onclick: () => showWindow(window) }, "show"),
      element("button", { type: "button", class: "plain", "aria-label": "dismiss", onclick: () => news.replaceChildren() }, "×"),
    );
  }

  async function reload() {
    const before = listed.windows;
    try {
      listed = await source.list();
    } catch (error) {
      showMessage(`The windows cannot be listed: ${messageOf(error)}`);
      return;
    }
    problems.replaceChildren(...listed.problems.map((text) => element("p", { class: "caveat" }, text)));
    const here = shown && listed.windows.find((each) => shown !== null && isSameWindow(each, shown) && each.wall_time === shown.wall_time);
    if (!here) {
      await show();
      return;
    }
    shown = here;
    if (JSON.stringify(before) === JSON.stringify(listed.windows)) return;
    drawChoices();
    drawViews();
    const added = listed.windows.filter((each) => !before.some((one) => isSameWindow(one, each)));
    const latest = added.at(-1);
    if (latest) offer(latest);
    if (follower) follower(listed.windows);
  }

  let width = 0;
  new ResizeObserver(() => {
    const isOther = width && Math.abs(width - main.clientWidth) > 4;
    width = main.clientWidth;
    if (isOther && current().isSized) draw();
  }).observe(main);

  drawViews();
  showMessage("Loading…");
  await reload();
  return { reload };
}

// Scroll the view with a key, or the table in it if only that can scroll. Returns whether it did.
/** @type {(main: HTMLElement, event: KeyboardEvent) => boolean} */
function scrolled(main, event) {
  if (event.target instanceof HTMLButtonElement && ![ "PageDown", "PageUp"].includes(event.key)) return false;
  const page = main.clientHeight - 60;
  /** @type {Record<string, number>} */
  const moves = { PageDown: page, PageUp: -page, " ": event.shiftKey ? -page : page, Home: -Infinity, End: Infinity };
  if (main.scrollHeight > main.clientHeight) {
    const move = moves[event.key];
    if (Number.isFinite(move)) main.scrollBy(0, move);
    else main.scrollTop = move > 0 ? main.scrollHeight : 0;
    return true;
  }
  const node = main.querySelector(".grid");
  const grid = node && gridOf(node);
  if (grid) grid.key(event);
  return Boolean(grid);
}

/** @type {(source: Source) => HTMLElement} */
function copyLink(source) {
  const label = "copy link";
  const button = element("button", {
    type: "button", title: "copy a link to this view",
    onclick: async () => {
      try {
        await navigator.clipboard.writeText(source.address.link());
        button.textContent = "copied";
        setTimeout(() => { button.textContent = label; }, 1500);
      } catch {
        const field = element("input", { class: "link", readonly: true, "aria-label": "link", value: source.address.link(), onblur: () => field.replaceWith(button) });
        button.replaceWith(field);
        field.select();
      }
    },
  }, label);
  return button;
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

// The state is in the address, so that a link shows what its sender saw. Keys of the state of a view start with its id and a dot.
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
