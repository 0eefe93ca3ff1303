// What a figure or a column is and how it is measured, in a sentence: the tooltips of the page.

/** @type {Record<string, string>} */
const EXPLANATIONS = {
  // Figures of a step.
  step: "Time of one optimizer step: the mean of the unprofiled steps, which ran without hooks and traces. The median step is next to it.",
  pass: "Time of one pass: the mean of the unprofiled passes, which ran without hooks and traces. The median pass is next to it.",
  "least time": "No step can be shorter on this chip: for each operator the longer of its products at the peak and its bytes at the bandwidth.",
  MFU: "Model FLOPs utilization: 2 × MACs of forward and backward, over the step's time and the chip's peak for the training's dtype.",
  HFU: "Hardware FLOPs utilization: as MFU, with the MACs that were computed again.",
  executed: "What the chip did: as HFU, without the MACs that masks skip, each at the peak of its dtype.",
  achieved: "2 × MACs of forward and backward over the step's time.",
  "samples/s": "Samples of all unprofiled steps over their time.",
  "tokens/s": "Tokens of all unprofiled steps over their time.",
  "peak live memory": "The most bytes of tensors alive at once in the counted step; kernels' own workspaces are not among them.",
  "memory needed": "The peak of live tensors, and what driver, libraries and the allocator take besides.",
  "CPU time": "User and system time of all threads of the process in an unprofiled step.",
  observer: "How much longer the steps timed by module take. The figures shown rest on unprofiled steps.",
  parameters: "Distinct parameters; a shared one counts once, where it is first.",
  MACs: "Multiply-accumulates of matrix products, convolutions, attention and recurrent gates: exact counts of the counted step.",
  FLOPs: "2 × MACs plus a convention for all other operators.",
  // Modules.
  module: "The module's name; repeated neighbours with the same counts share a row.",
  "total time": "Forward, backward and recompute together, with all modules below: medians of the steps timed by module, scaled to the unprofiled ones. It is unknown where one of these phases ran and was not timed; the columns of the phases have what is known.",
  "share of the step": "The module's total time over the time of the unprofiled step.",
  "of the roof": "The least time that the chip allows for the module's operators, over the time that they took.",
  calls: "How often it was called in the counted step.",
  trainable: "Parameters that need a gradient.",
  "peak memory": "The most bytes alive at once while the module or one below it ran.",
  "rank spread": "How much longer the slowest rank takes than the median rank, at the worst phase.",
  // Suffixes of columns by phase.
  "… MACs": "Multiply-accumulates in this phase: exact counts.",
  "… FLOPs": "2 × MACs plus a convention for all other operators, in this phase.",
  "… bytes": "The least traffic of the operators as dispatched, in this phase. It is not DRAM traffic.",
  "… communicated": "Payload of the collectives in this phase.",
  "… time": "Time in this phase: on CUDA the stream's, else the host's. Medians of the steps timed by module, scaled to the unprofiled ones.",
  "… kernels": "Time of the kernels that it launched in this phase, from a trace.",
  "… FLOP/s": "2 × MACs over the time in this phase.",
  "… FLOPs/byte": "FLOPs over the least traffic, without what a mask leaves out: the intensity of the roofline.",
  // Operators.
  operator: "The operator as torch dispatches it.",
  dtype: "The dtype of a contraction's operands, else of the result.",
  "bytes moved": "The least traffic of the operators as dispatched. It is not DRAM traffic.",
  "FLOPs/byte": "FLOPs over the least traffic, without what a mask leaves out: the intensity of the roofline.",
  "own device, traced": "Time of the kernels that it launched itself in a traced batch, in all phases.",
  "device, traced": "Time of the kernels that it and the operators that it calls launched in a traced batch, in all phases.",
  "own host, traced": "Time on the host in a traced batch, without the operators that it calls.",
  "host, traced": "Time on the host in a traced batch, with the operators that it calls.",
  // Roofline.
  phase: "Forward, backward, recompute, optimizer, or anything else.",
  "bound by": "Which side of the roof needs more time: the products, or the bytes.",
  "to win": "What a step would be shorter if this ran at its roof.",
  time: "Time of a step in this phase: kernels from a trace where there is one, else the stream's or the host's.",
  "at the roof": "The least time that the chip allows: for each operator the longer of its FLOPs at the peak and its bytes at the bandwidth.",
  "FLOP/s": "FLOPs over the time.",
  "roof FLOP/s": "FLOPs over the least time that the chip allows.",
  // Compare.
  "what changed": "Slower or faster: the time at equal work, beyond noise and beyond what all modules have in common.",
  "time before": "Of forward, backward and recompute, in the first run.",
  "time after": "Of forward, backward and recompute, in the second run.",
  "before and after": "Both times as bars, the first above the second.",
  change: "What the time after adds to the time before.",
  interval: "Where the change lies, without what all modules have in common: more than a step varies within one run if 0 is not in it. Noise alone is outside once in a thousand comparisons.",
  "cost a step": "Seconds lost in a step beyond what all modules have in common; a gain is negative.",
  "MACs before": "Multiply-accumulates of the module itself in the first run.",
  "MACs after": "Multiply-accumulates of the module itself in the second run.",
};

const PHASES = /^(forward|backward|recompute|optimizer|other) /;

/** @type {(label: string) => string} */
export function explanation(label) {
  if (Object.hasOwn(EXPLANATIONS, label)) return EXPLANATIONS[label];
  if (label.startsWith("share of ")) return `The row's part of the ${label.slice(9)} that are shown together.`;
  const suffix = label.replace(PHASES, "… ");
  return Object.hasOwn(EXPLANATIONS, suffix) ? EXPLANATIONS[suffix] : "";
}
