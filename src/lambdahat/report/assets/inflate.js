// Unpacks gzip at once (RFC 1951 after ten bytes of header), for paper: what prints does not wait for promises
const inflate = (() => {
  const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
  const steps = (first, count, group) => { // base and extra bits of the codes of lengths or distances
    const found = [];
    for (let i = 0, base = first; i < count; i++) {
      const extra = Math.max(0, Math.floor(i / group) - 1);
      found.push([base, extra]);
      base += 1 << extra;
    }
    return found;
  };
  const LENGTHS = [...steps(3, 28, 4), [258, 0]], DISTANCES = steps(1, 30, 2);
  function tree(sizes) {
    const counts = new Uint16Array(16), offsets = new Uint16Array(16), symbols = new Uint16Array(sizes.length);
    for (const size of sizes) if (size) counts[size]++;
    for (let i = 1; i < 16; i++) offsets[i] = offsets[i - 1] + counts[i - 1];
    sizes.forEach((size, symbol) => size && (symbols[offsets[size]++] = symbol));
    return { counts, symbols };
  }
  function inflated(packed) {
    const size = new DataView(packed.buffer).getUint32(packed.length - 4, true), out = new Uint8Array(size);
    let at = 10, held = 0, kept = 0, end = 0, last;
    function bits(count) {
      for (; kept < count; kept += 8) held |= packed[at++] << kept;
      const value = held & ((1 << count) - 1);
      held >>>= count;
      kept -= count;
      return value;
    }
    function symbol({ counts, symbols }) {
      for (let i = 1, code = 0, first = 0, index = 0; ; i++) {
        code |= bits(1);
        if (code - first < counts[i]) return symbols[index + code - first];
        index += counts[i];
        first = (first + counts[i]) << 1;
        code <<= 1;
      }
    }
    do {
      last = bits(1);
      const kind = bits(2);
      if (kind === 0) {
        held = kept = 0;
        const count = packed[at] | (packed[at + 1] << 8);
        out.set(packed.subarray(at + 4, at + 4 + count), end);
        at += 4 + count;
        end += count;
        continue;
      }
      let letters = tree(Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))), far = tree(Array(30).fill(5));
      if (kind === 2) {
        const many = bits(5) + 257, others = bits(5) + 1, sizes = Array(19).fill(0), all = [];
        for (let i = 0, count = bits(4) + 4; i < count; i++) sizes[ORDER[i]] = bits(3);
        for (const codes = tree(sizes); all.length < many + others; ) {
          const code = symbol(codes);
          if (code < 16) all.push(code);
          else all.push(...Array(code === 16 ? bits(2) + 3 : code === 17 ? bits(3) + 3 : bits(7) + 11).fill(code === 16 ? all.at(-1) : 0));
        }
        letters = tree(all.slice(0, many));
        far = tree(all.slice(many));
      }
      for (let code = symbol(letters); code !== 256; code = symbol(letters)) {
        if (code < 256) { out[end++] = code; continue; }
        const [base, extra] = LENGTHS[code - 257], stop = end + base + bits(extra), [near, more] = DISTANCES[symbol(far)];
        for (let from = end - near - bits(more); end < stop; ) out[end++] = out[from++];
      }
    } while (!last);
    return new TextDecoder().decode(out);
  }
  return inflated;
})();
