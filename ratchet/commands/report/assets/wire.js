"use strict";
// Unpacks what ratchet/commands/report/wire_format.py packs.

const ARRAYS = {
  u1: Uint8Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array,
};

/** Returns {facts, arrays} of a packed buffer. The arrays are views of the buffer. */
function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const { arrays: places, ...facts } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  for (const [name, [kind, offset, count]] of Object.entries(places)) {
    arrays[name] = new ARRAYS[kind](buffer, 4 + length + offset, count);
  }
  return { facts, arrays };
}

/** Returns the decompressed content of the page's element with this id; null if there is none. */
async function embedded(id) {
  const node = document.getElementById(id);
  if (!node) return null;
  const text = atob(node.textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
