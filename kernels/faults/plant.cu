// Plants a fault into words of a matrix, or of each of a stack of them, whenever it is replayed often enough; or takes it
// back.
//
// A visit is one matrix of one run of this kernel; they are counted in the table. A change (w & keep) ^ flip is made in the
// visit that it names, and in all that follow if it comes back.
//
// Launch   (1) thread: changes of one word are made in their order
// Macros   WORD, the type of a word; ENTRY the name of the kernel
// Storage  x: count matrices, `apart` words apart. table: [0] visits so far, [1] number of changes, 0 when the fault is
//          switched off; then for each change its visit, COMES_BACK or ONCE, the place of its word in a matrix, keep, flip,
//          how often it was made; the word before, and the number of the matrix, from 1, or 0 where it is not there
// back     0: plant, 1: put the words back
using Bits = unsigned long long;
using Word = WORD;
using Index = long long;

constexpr Index HEAD = 2, FIELDS = 8;
constexpr Bits COMES_BACK = 1, ONCE = 2;
enum { VISIT, HOW, PLACE, KEEP, FLIP, MADE, BEFORE, WHERE };

extern "C" __global__ void __launch_bounds__(1) ENTRY(Word* x, Index count, Index apart, Bits* table, Index back) {
  const Bits first = table[0];
  for (Bits i = 0; i < table[1]; i++) {
    Bits* change = table + HEAD + FIELDS * i;
    if (back) {
      if (change[WHERE]) x[(Index(change[WHERE]) - 1) * apart + Index(change[PLACE])] = Word(change[BEFORE]);
      change[WHERE] = 0;
      continue;
    }
    for (Index matrix = 0; matrix < count; matrix++) {
      const Bits visit = first + Bits(matrix);
      const bool due = visit == change[VISIT] || (change[HOW] & COMES_BACK && visit > change[VISIT]);
      if (!due || (change[HOW] & ONCE && change[MADE])) continue;
      Word* word = x + matrix * apart + Index(change[PLACE]);
      change[BEFORE] = Bits(*word);
      change[WHERE] = Bits(matrix) + 1;
      *word = Word((Bits(*word) & change[KEEP]) ^ change[FLIP]);
      change[MADE]++;
    }
  }
  if (!back) table[0] = first + Bits(count);
}
