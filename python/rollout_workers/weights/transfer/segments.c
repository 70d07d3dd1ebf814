/* Segments of a patch, made and applied in one pass over memory each. The format stands in patch.py, the same in numpy in plain.py.
 *
 * Widths are 1, 2, 4 or 8 bytes an element; nothing need be aligned. Compiled by scripts/kernel for a little-endian machine, called
 * by kernel.py through ctypes, so no Python header is needed and the interpreter's lock is not held. */

#include <stdint.h>
#include <string.h>

#define SEGMENT ((uint64_t)1 << 18) /* elements */
#define HEAD 16                     /* bytes: marks, values, bytes a mark, 0 */
#define DENSE 160                   /* elements a change, up to which marks take one byte */
#define LINE 64                     /* bytes */
#define STRIP 256                   /* words of 8 bytes compared before those that differ are looked into, in the nearest cache */
#define EARLY 2048                  /* bytes between asking for a line of memory and reading it */
#define AHEAD 32                    /* marks between asking for a line of memory and writing to it */

#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

INLINE u64 padded(u64 size) { return (size + 7) & ~(u64)7; }
INLINE u64 least(u64 a, u64 b) { return a < b ? a : b; }

/* width is a constant wherever these are inlined. By type, or no loop over it becomes one over vectors. */
INLINE u64 load(const u8 *from, u64 width) {
  u16 two;
  u32 four;
  u64 eight;
  switch (width) {
    case 1: return *from;
    case 2: return memcpy(&two, from, 2), two;
    case 4: return memcpy(&four, from, 4), four;
    default: return memcpy(&eight, from, 8), eight;
  }
}
INLINE void store(u8 *to, u64 value, u64 width) { memcpy(to, &value, width); }

/* One element: always written down, and counted only where it differs. At one change in a hundred a branch would be guessed wrongly
 * for every fourth line of memory, which costs more than all the rest. */
INLINE u64 note(const u8 *old, const u8 *new, u64 width, u64 at, u64 found, u32 *places, u8 *values) {
  const u64 value = load(new + at * width, width);
  places[found] = at;
  store(values + found * width, value, width);
  return found + (load(old + at * width, width) != value);
}

/* Which elements differ, ascending, and what new has there, into places and values (room for count); returns how many. */
INLINE u64 find(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *values) {
  const u64 lanes = 8 / width, words = count * width / LINE * (LINE / 8);
  u64 found = 0;
  for (u64 first = 0; first < words; first += STRIP) {
    const u64 stop = least(words, first + STRIP);
    u32 differing[STRIP];
    u64 some = 0;
    for (u64 line = first; line < stop; line += LINE / 8) {
      __builtin_prefetch(old + line * 8 + EARLY);
      __builtin_prefetch(new + line * 8 + EARLY);
      for (u64 word = line; word < line + LINE / 8; word++) {
        differing[some] = word;
        some += load(old + word * 8, 8) != load(new + word * 8, 8);
      }
    }
    for (u64 i = 0; i < some; i++)
      for (u64 lane = 0; lane < lanes; lane++) found = note(old, new, width, differing[i] * lanes + lane, found, places, values);
  }
  for (u64 at = words * lanes; at < count; at++) found = note(old, new, width, at, found, places, values);
  return found;
}

/* Distances as marks; returns how many. */
INLINE u64 mark(const u32 *places, u64 found, u64 size, u8 *marks) {
  const u64 highest = ((u64)1 << 8 * size) - 1;
  u64 made = 0, before = 0;
  for (u64 i = 0; i < found; i++) {
    u64 distance = places[i] - before;
    before = places[i];
    for (; distance >= highest; distance -= highest) store(marks + made++ * size, highest, size);
    store(marks + made++ * size, distance, size);
  }
  return made;
}

INLINE u64 encode(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *out, u64 *changed) {
  u8 *to = out, *new_values = (u8 *)(places + SEGMENT);
  for (u64 first = 0; first < count; first += SEGMENT) {
    const u8 *base = old + first * width, *wanted = new + first * width;
    const u64 here = least(SEGMENT, count - first);
    const u64 found = find(base, wanted, width, here, places, new_values);
    const u32 size = found * DENSE >= here ? 1 : 2;
    const u64 marks = size == 1 ? mark(places, found, 1, to + HEAD) : mark(places, found, 2, to + HEAD);
    const u32 head[4] = {marks, found, size, 0};
    memcpy(to, head, HEAD);
    u8 *values = to + HEAD + padded(marks * size);
    memset(to + HEAD + marks * size, 0, values - (to + HEAD + marks * size));
    memcpy(values, new_values, found * width);
    to = values + padded(found * width);
    memset(values + found * width, 0, to - (values + found * width));
    *changed += found;
  }
  return to - out;
}

/* count elements of old and new as segments. places: room for the places and then the values of a segment; out: for as many
 * bytes as kernel.py says. Returns the bytes written, and adds to *changed how many elements differ. */
u64 rollout_encode(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *out, u64 *changed) {
  switch (width) {
    case 1: return encode(old, new, 1, count, places, out, changed);
    case 2: return encode(old, new, 2, count, places, out, changed);
    case 4: return encode(old, new, 4, count, places, out, changed);
    default: return encode(old, new, 8, count, places, out, changed);
  }
}

/* Whether so many marks lead to so many values, all within count elements. */
INLINE int fits(const u8 *marks, u64 made, u64 size, u64 values, u64 count) {
  const u32 highest = ((u32)1 << 8 * size) - 1;
  u64 end = 0, skips = 0;
  for (u64 i = 0; i < made; i++) {
    const u32 distance = load(marks + i * size, size);
    end += distance;
    skips += distance == highest;
  }
  return skips == made - values && (made == 0 || end < count);
}

/* Look at the segments of count elements, from byte at of body on. Writes where each begins into places. Returns where the last one
 * ends, or -1 - n where segment n is cut short, is none, or leads out of its elements. */
int64_t rollout_check(const u8 *body, u64 length, u64 at, u64 width, u64 count, u64 *places) {
  for (u64 n = 0; n * SEGMENT < count; n++) {
    u32 head[4];
    if (length - at < HEAD) return -1 - (int64_t)n;
    memcpy(head, body + at, HEAD);
    const u64 made = head[0], values = head[1], size = head[2], here = least(SEGMENT, count - n * SEGMENT);
    if (values > made || (size != 1 && size != 2)) return -1 - (int64_t)n;
    if (length - at - HEAD < padded(made * size) + padded(values * width)) return -1 - (int64_t)n;
    const u8 *marks = body + at + HEAD;
    if (!(size == 1 ? fits(marks, made, 1, values, here) : fits(marks, made, 2, values, here))) return -1 - (int64_t)n;
    places[n] = at;
    at += HEAD + padded(made * size) + padded(values * width);
  }
  return at;
}

INLINE void scatter(const u8 *marks, u64 made, u64 size, const u8 *values, u64 width, u8 *target) {
  const u64 highest = ((u64)1 << 8 * size) - 1;
  u64 place = 0, asked = 0;
  for (u64 i = 0; i < least(AHEAD, made); i++) {
    asked += load(marks + i * size, size);
    __builtin_prefetch(target + asked * width, 1);
  }
  for (u64 i = 0; i < made; i++) {
    if (i + AHEAD < made) {
      asked += load(marks + (i + AHEAD) * size, size);
      __builtin_prefetch(target + asked * width, 1);
    }
    const u64 distance = load(marks + i * size, size);
    place += distance;
    if (distance == highest) continue;
    store(target + place * width, load(values, width), width);
    values += width;
  }
}

INLINE void write(const u8 *body, const u64 *places, u64 segments, u64 width, u8 *target) {
  for (u64 n = 0; n < segments; n++) {
    u32 head[4];
    memcpy(head, body + places[n], HEAD);
    const u8 *marks = body + places[n] + HEAD, *values = marks + padded((u64)head[0] * head[2]);
    u8 *to = target + n * SEGMENT * width;
    if (head[2] == 1) scatter(marks, head[0], 1, values, width, to);
    else scatter(marks, head[0], 2, values, width, to);
  }
}

/* Write the values of segments that were looked at over those of target, where the first one's elements begin. */
void rollout_write(const u8 *body, const u64 *places, u64 segments, u64 width, u8 *target) {
  switch (width) {
    case 1: write(body, places, segments, 1, target); return;
    case 2: write(body, places, segments, 2, target); return;
    case 4: write(body, places, segments, 4, target); return;
    default: write(body, places, segments, 8, target); return;
  }
}
