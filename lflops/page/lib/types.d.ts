// Types for `tsc`: the data of the page, and the values that its parts pass to each other. The payload and a comparison have the fields of the
// Python structs in lflops/report/payload/, which their docstrings explain.

/** A number. A count above 2^53 is a string of digits; null is unknown. */
type Count = number | string | null;
type Value = Count | boolean;

/** A table, column by column. A column with the same value in all rows is that value. */
type Columns = Record<string, Value[] | Value>;

/** A table in which every column is a list. */
type Lists = Record<string, any[]>;

interface Fact {
  name: string; label: string; value: number | null; unit: string; text: string; remark: string; of: string; share: number | null; is_caveat: boolean;
}
interface Part {
  name: string; label: string; seconds: number; share: number; text: string; advice: string; modules: [string, number][];
}
interface Report {
  subject: Fact[]; speed: Fact[]; model: Fact[]; breakdown: Part[]; why_no_breakdown: string; remarks: Fact[];
}
interface Trace { rank: string; file: string; address?: string }

interface Ceiling {
  hardware: string; source: string; dtype: string; flops_per_second: number; bandwidth_bytes_per_second: number | null; is_reference: boolean;
}
interface Points { table: Columns & { phase: string[] }; left_out: number }
interface Roofs { ceilings: Ceiling[]; why_unknown: string; modules: Points; repeats: Points; operators: Points; fusion: string }

interface Kernels {
  table: Columns & { name: string[]; module: number[]; phase: string[] }; left_out: number; timed_on: string; graphs: number;
  assigned: number | null; fused: number | null;
}
interface Operators {
  table: Columns & { operator: string[]; phase: string[] }; within: Columns & { row: number[]; module: number[] }; unsupported: number;
  kernels: Kernels | null;
}

interface LiveMemory {
  operators: number; peak_bytes: Count; peak: number | null; chip: string | null; capacity_bytes: number | null; points: Lists;
  categories: string[]; by_category: [string, Count][];
}

/** The live memory of a step. */
interface Memory extends LiveMemory {
  source: string; rank: number | null; modules: Lists; more: [number, Count]; largest: number; alive: Lists; savings: [string, Count, string][];
}

/** A snapshot of CUDA memory. */
interface Snapshot extends LiveMemory {
  title: string; sentences: string[]; remedies: string[]; ran_out: boolean; holders: Lists;
  by_module: { matched_share: number; moments: Record<string, Record<string, Count>> } | null;
}

interface Ranks {
  said: [string, string][]; ranks: Lists; slowest_first: number[]; compared: boolean; places: Lists; seconds: (number | null)[][];
}

interface Payload {
  lflops: number; head: Head; title: string; partial: boolean; has_timeline?: boolean; peak_flops_per_second: number | null;
  report: Report;
  modules: Columns & { name: string[] }; operators: Operators | null; roofline: Roofs | null; memory: Memory | null; ranks: Ranks | null;
  traces?: Trace[];
}

interface RankTimeline {
  rank: number; step: number | null; source: "traced" | "module_timing"; length: number; names: string[]; slices: Lists; operators: Lists; kernels: Lists;
  left_out: [number, number, number];
}
interface Timeline { ranks: RankTimeline[]; memory_at: number[] | null }

/** The ledger of a run. The docstrings in lflops/ledger/account.py explain its fields. */
interface Start { begin: number; seconds: number; first_step: number; last_step: number; ended: string }
interface Ledger {
  seconds: Record<string, number>; total: number;
  slow_steps: { step: number; end: number; seconds: number; usual: number; cost: number; cause: string }[];
  starts: Start[];
  step_groups: StepGroup[];
  spans: { begin: number; seconds: number; steps: number; spent: Record<string, number>; memory: number | null }[];
}
interface LedgerShown { title: string; ledger: Ledger; categories: Record<string, string>; causes: Record<string, string> }

/** Consecutive steps of one mode: see the docstrings in lflops/ledger/account.py. Fields with their default are left out. */
interface StepGroup {
  first: number; last: number; spent: Record<string, number>; longest: number; between?: Record<string, number>; steps?: number; elements?: number;
  mode?: "unprofiled" | "profiled" | "warm_up"; start?: number;
}

/** The first screen. The docstrings in lflops/report/first_screen.py explain its fields. */
interface Confidence { level: "high" | "medium" | "low"; why: string[] }
interface Card {
  cause: string; title: string; seconds: number | null; text: string; action: string; sentence: string; view: string; module: string;
  confidence: Confidence; is_issue: boolean; is_lower_bound: boolean;
}
interface Steps { number: number; mean: number; p50: number | null; p95: number | null; source: "run" | "window"; said: string }
interface RankDot { rank: number; status: string; lost: number; said: string }
interface FirstScreen {
  title: string; header: string[]; confidence: Confidence; figures: Fact[]; trained: string; steps: Steps | null; cards: Card[]; nothing: string;
  phases: Part[]; hint: string; ranks: RankDot[];
}
interface RunShown { screen: FirstScreen; steps: StepGroup[]; ledger: LedgerShown | null }

interface Change { before: Count; after: Count }
interface Timing {
  before: number | null; after: number | null; ratio: number | null; per_mac: number | null; beyond: number | null; low: number | null;
  high: number | null; lost: number | null; verdict: "slower" | "faster" | "same" | null;
  caveat?: "busy" | "few_steps" | "varied" | null;
}
interface Comparison {
  headline: string[]; is_news: boolean; facts: Record<string, [Value, Value]>; whole: { ratio: number; modules: number; error: number } | null; step: Timing;
  phases: Record<string, Timing>; figures: Record<string, [Count, Count]>; modules: Columns;
}

/** A window that can be chosen. In a file with one profile it has no name. `at` is its position in a file. */
interface ProfileWindow {
  run: string | null; tag: string | null; step: number | string | null; at?: number; wall_time?: number; head?: Head | null;
}

/** The data of a window that lists of windows show. */
interface Head {
  step: number | null; when: string; kind: string; device: string; strategy: string | null; ranks: number; dtype: string | null; partial: boolean;
  figures: Record<string, number>; ranges: Record<string, [number, number]>;
}
interface Listed { windows: ProfileWindow[]; problems: string[] }

/** The source of the page's data. The latest window is the last in the list. */
interface Source {
  /** A text that is kept in links and reloads. */
  address: {
    read(): string;
    /** A step is an entry in the browser's history. */
    write(text: string, isStep: boolean): void;
    link(): string;
    onback(act: () => void): void;
  };
  /** The pattern by which the host of the page filters runs. */
  runFilter?(): RegExp | null;
  /** Whether the host of the page chooses light or dark. */
  hasTheme?: boolean;
  /** The id of the view to show first. */
  open?: string;
  list(): Promise<Listed>;
  read(window: ProfileWindow): Promise<Payload>;
  /** The timeline of a window, if it has one. */
  timeline(window: ProfileWindow): Promise<Timeline>;
  /** The run of a window. */
  run(window: ProfileWindow): Promise<RunShown>;
  compare(before: ProfileWindow, after: ProfileWindow): Promise<Comparison>;
  /** Shows a trace by its address, if that is possible. */
  viewer?: (address: string, title: string) => Promise<HTMLElement>;
}

/** Texts and flags of a view, which are kept in the address. */
type State = Record<string, any>;

interface Context {
  state: State;
  /** Stores the state. Call it after each change. */
  remember(): void;
  /** Shows another view, with changes of its state. */
  go(id: string, changes?: State): void;
  source: Source;
  listed: Listed;
  /** The window of the payload. */
  window: ProfileWindow;
  /** The rank that is chosen above the views. */
  rank: number | null;
  chooseRank(rank: number | null): void;
  /** Shows another window, in this view or in the view with this id. */
  showWindow(window: ProfileWindow, id?: string): void;
  /** Registers a function that is called when the list of windows changes. */
  follow(act: (windows: ProfileWindow[]) => void): void;
}

interface View {
  id: string;
  label: string;
  /** Its name among the views of one tab. */
  part?: string;
  /** Whether its charts depend on the width of the page. */
  isSized?: boolean;
  /** Whether the view can show a single rank. */
  ofOneRank?: boolean;
  /** The view whose tab it is in, if it has no tab at the top. */
  within?: string;
  /** Whether there is something to show. Without it there always is. */
  has?(payload: Payload, listed: Listed): boolean;
  draw(payload: Payload, context: Context): HTMLElement;
}

type Reader<T = any> = (row: number) => T;
type Format = (value: any, row?: number) => string;
type Order = ((one: number, other: number) => number) | null;
type Sort = "none" | "ascending" | "descending";

interface GridContent<Row = any> {
  columns: { label: string; kind?: string; sort: Sort; onsort(): void }[];
  rows: Row[];
  cells(row: Row): Node[];
  /** For a tree: the depth of a row; whether it is open, or null if it has no rows below it; and the function that opens or closes it. */
  level?(row: Row): number;
  isOpen?(row: Row): boolean | null;
  toggle?(row: Row): void;
  onchoose?(row: Row): void;
  onenter?(row: Row): void;
  /** The exact values for a file, if they differ from the cells. */
  exported?: { labels: string[]; values(row: Row): Value[] };
}

/** A column of a flat table. A column without `text` has words. */
interface FlatColumn { id: string; label: string; text?: Format; hasBar?: boolean; read: Reader }
interface NumberColumn { label: string; text: Format; read: Reader; most: number; reason?: Reader<string> }

/** A column of modules: the self value and the inclusive value of a row; the value of several rows; whether that is their sum. */
interface ModuleColumn {
  id: string; label: string; text: Format; own: Reader; total: Reader; over(read: Reader, rows: number[]): any; adds: boolean;
}

/** The rows that a row of a folded tree stands for: its neighbours, and the rows at the same position in folded parents. */
interface FoldedRow { run: number[]; members: number[]; first: number }

interface RooflinePoint {
  row: number; name: string; label: string; module: number | null; times: number; has_below: boolean; phase: string; intensity: number; height: number;
  weight: number; isTimed: boolean; potential: number; over: string | null; [field: string]: any;
}
interface Scale { at(value: number): number; value(place: number): number; ticks: number[]; low: number; high: number }
