// Data of a file that opens offline.

// The value in a part of the document, deflated and in base64.
/** @type {(part: HTMLElement) => Promise<any>} */
export async function unpacked(part) {
  const bytes = Uint8Array.from(atob(part.textContent ?? ""), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}
