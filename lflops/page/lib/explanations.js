// The tooltips of the page: what a figure or a column is, and how it is measured.

/** @type {Record<string, string>} */
const EXPLANATIONS = {
  // Figures of a step.
  step: "The time of one optimizer step: the mean of the unprofiled steps, which run without hooks and traces. The median is shown as well.",
  pass: "The time of one pass: the mean of the unprofiled passes, which run without hooks and traces. The median is shown as well.",
  "least time": "The shortest possible time of a step on this chip. It is the sum over all operators. Each operator adds the longer of two times: the time of its matmuls at the peak, and the time to move its bytes at the bandwidth.",
  "share of peak": "2 × MACs of forward and backward, divided by the time of the module, as a share of the chip's peak. It does not include the time outside modules, so it is not MFU.",
  MFU: "Model FLOPs utilization: 2 × MACs of forward and backward, divided by the step time and by the chip's peak for the training dtype.",
  HFU: "Hardware FLOPs utilization: like MFU, plus the recomputed MACs.",
  executed: "The share of the peak that the chip really executed: like HFU, without the MACs that are skipped because of masks, and with the peak of each dtype.",
  achieved: "2 × MACs of forward and backward, divided by the step time.",
  "samples/s": "Samples of all unprofiled steps, divided by the time of these steps.",
  "tokens/s": "Tokens of all unprofiled steps, divided by the time of these steps.",
  "peak live memory": "The most bytes of tensors alive at once in the counting step, without the internal workspaces of kernels.",
  "memory needed": "The peak of live tensors, plus the memory of the driver, the libraries and the allocator.",
  "CPU time": "User and system time of all threads of the process in an unprofiled step.",
  "cost of timing": "The time of a module-timing step, divided by the time of an unprofiled step. All other figures come from unprofiled steps.",
  parameters: "Distinct parameters. A shared parameter counts once, in the first module that has it.",
  MACs: "Multiply-accumulates of matmuls, convolutions, attention and recurrent gates: exact counts of the counting step.",
  FLOPs: "2 × MACs, plus the FLOPs of all other operators by a documented convention.",
  // Modules.
  module: "The module's name. Neighboring modules with the same counts share a row.",
  "total time": "Forward, backward and recompute together, with all submodules: medians of the module-timing steps, scaled to the unprofiled steps. The total is unknown if one of these phases ran but was not timed. The columns of the phases then show the times that are known.",
  "share of the step": "The module's total time, divided by the time of an unprofiled step.",
  "of the limit": "The roofline-bound time, divided by the measured time: 100 % is the roofline limit.",
  calls: "Number of calls in the counting step.",
  trainable: "Parameters that need a gradient.",
  "peak memory": "The most bytes alive at once while the module or a submodule ran.",
  "rank spread": "How much longer the slowest rank takes than the median rank, in the phase with the largest difference.",
  // Suffixes of columns by phase.
  "… MACs": "Multiply-accumulates in this phase: exact counts.",
  "… FLOPs": "2 × MACs, plus the FLOPs of all other operators by a documented convention, in this phase.",
  "… bytes": "The least memory traffic of the operators that torch dispatches in this phase. It is not the measured DRAM traffic.",
  "… communicated": "Bytes of the tensors that collectives, such as all-reduce, communicate in this phase.",
  "… time": "Time in this phase: stream time on CUDA, otherwise host time. Medians of the module-timing steps, scaled to the unprofiled steps.",
  "… kernels": "Time of the kernels that the module launched in this phase, from a trace.",
  "… FLOP/s": "2 × MACs, divided by the time in this phase.",
  "… FLOPs/byte": "FLOPs without the work that is skipped because of masks, divided by the bytes moved. This is the intensity in the roofline chart.",
  // Operators.
  operator: "The operator as torch dispatches it.",
  dtype: "For matmuls and convolutions, the dtype of the operands; for other operators, the dtype of the result.",
  "bytes moved": "The least possible memory traffic of the operators that torch dispatches. It is not the measured DRAM traffic.",
  "FLOPs/byte": "FLOPs without the work that is skipped because of masks, divided by the bytes moved. This is the intensity in the roofline chart.",
  "self device time, traced": "Time of the kernels that the operator launched itself in a traced batch, in all phases.",
  "device time, traced": "Time of the kernels that the operator and the operators that it calls launched in a traced batch, in all phases.",
  "self host time, traced": "Host time in a traced batch, without the operators that the operator calls.",
  "host time, traced": "Host time in a traced batch, with the operators that the operator calls.",
  // Roofline.
  phase: "Forward, backward, recompute, optimizer or other.",
  "bound by": "The side of the roofline that needs more time: compute, or memory.",
  "potential speed-up": "The time that a step would save if the module or operator ran at its roofline limit.",
  time: "Time per step in this phase: kernel time if there is a trace, otherwise stream time or host time.",
  "roofline-bound time": "The least time that the chip allows. It is the sum over the operators. Each operator adds the longer of two times: the time of its FLOPs at the peak, and the time to move its bytes at the bandwidth.",
  "FLOP/s": "FLOPs, divided by the time.",
  "roofline FLOP/s": "FLOPs, divided by the least time that the chip allows.",
  // Compare.
  "what changed": "Slower or faster means that the time changed although the work is equal. The change is larger than noise, and larger than the change that all modules have in common.",
  "time before": "Time of forward, backward and recompute in the first run.",
  "time after": "Time of forward, backward and recompute in the second run.",
  "before and after": "Both times as bars, the first above the second.",
  change: "The change of the time from the first run to the second.",
  interval: "The range of the change, after the change that all modules have in common is removed. If the range does not contain 0, the change is larger than the variation within one run. Noise alone causes such a range once in a thousand comparisons.",
  "cost per step": "Seconds that the module adds to a step, beyond the change that all modules have in common. The value is negative if the module became faster.",
  "MACs before": "Self MACs of the module in the first run.",
  "MACs after": "Self MACs of the module in the second run.",
};

const PHASES = /^(forward|backward|recompute|optimizer|other) /;

/** @type {(label: string) => string} */
export function explanation(label) {
  if (Object.hasOwn(EXPLANATIONS, label)) return EXPLANATIONS[label];
  if (label.startsWith("share of ")) return `The row's share of all ${label.slice(9)} in the table.`;
  const suffix = label.replace(PHASES, "… ");
  return Object.hasOwn(EXPLANATIONS, suffix) ? EXPLANATIONS[suffix] : "";
}
