// Stages 2, 8, 11 and 14 of repair.cu: elements are computed again and replaced, and their lines checked again.
#pragma once
#include "repair/repair_problem.cuh"

constexpr int SHARE = 4, PAIR = 2;  // lines and columns that are computed again together
constexpr int FEW = 64;             // elements of a group that are better computed one by one
constexpr int PER_WARP = TURNED ? 2 * SHARE * PAIR : 2 * SHARE * 32;  // sums of a warp

// ---- stage 8: C(lines, candidates) of a group again -----------------------------------------------------------------

enum What { OUTLIERS, ALL, NONE };  // is replaced: what is out of the ordinary, whatever is not the product, nothing

// How far off C(line, j) may be, in units of roundoff, where its terms are added in order and every rounding has one direction,
// as where terms are much alike: the sum of the moduli of all partial sums, from the first term on or from the last. One
// order of additions leaves many times more than another then, and a library adds up some tiles of C in one, some in another.
INLINE double off_in_order(const Problem& p, Index line, Index j) {
  const A_TYPE *left = p.left(line), *right = p.right(p.product_of(line), j);
  double first = 0, last = 0, from_first = 0, from_last = 0;
#pragma unroll 4
  for (Index l = 0; l < p.k; l++) {
    const Index back = p.k - 1 - l;
    first += double(widened(left[l * p.l_cs])) * double(widened(right[l * p.r_rs]));
    last += double(widened(left[back * p.l_cs])) * double(widened(right[back * p.r_rs]));
    from_first += fabs(first);
    from_last += fabs(last);
  }
  return fabs(p.alpha) * fmax(from_first, from_last);
}

// With sum = L(line, :) R(:, j) and size = |L(line, :)| |R(:, j)|: whether C(line, j) is out of the ordinary, that is
// further off than rounding can make it, or OUTLIER times more than is `usual`, be that 1 at least, and than additions in
// order may leave; and replaces it.
// Where nothing is replaced a suspicion costs little: what is usual may be less, and is no more. In a line that is wrong
// all over the fault itself is usual, and whatever differs is replaced: told is what is off by more than twice
// sqrt(k) u |L| |R|, beyond which rounding leaves nothing (N. J. Higham, T. Mary 2019); not so of tensor cores, whose
// rounding is not known better.
INLINE bool judge(const Problem& p, Index line, Index j, double sum, double size, double usual, What what) {
  const double c0 = p.beta != 0 ? p.beta * fresh(p.added(line, j)) : 0.0;
  const double exact = p.alpha * sum + c0, s = fabs(p.alpha) * size + fabs(c0), found = fresh(p.result(line, j));
  const C_TYPE made = narrowed(exact, C_TYPE());  // 16 bits by way of float: rounded twice, by half a unit and a bit
  const double value = widened(made);
  if (found == value || (found != found && value != value)) return false;
  const double excess = fabs(found - exact) - p.out_roundoff * (fabs(exact) + fabs(c0)) - p.underflow;
  const bool tensor = sizeof(A_TYPE) == 2 || p.input_factor > 0;
  const double most = what == ALL && !tensor ? 2 * sqrt(double(p.k)) / OUTLIER : infinity();
  const double unit = what == NONE ? fmax(0.25, fmin(usual, 1.0)) * 0.5 : fmax(fmin(usual, most), 1.0);
  const bool within = finite(s) && excess <= p.rigorous * (1 + p.out_roundoff) * s;
  const bool ordinary = within && (excess <= OUTLIER * unit * p.unit_roundoff * s ||
                                   (what == OUTLIERS && excess <= TRUNCATED * p.unit_roundoff * off_in_order(p, line, j)));
  if (what == NONE || (what == OUTLIERS && ordinary)) return !ordinary && finite(s);
  if (ordinary && excess <= 0x1p-50 * s) return false;  // the sum of a float64 again, in another order
  // Where magnitudes overflow, what is not finite may be what honest arithmetic gives: for the host to see.
  const double largest = p.unit_roundoff > 1e-12 ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;
  if (!finite(s) || (!finite(found) && s >= largest / 2)) {
    if (what == OUTLIERS) atomicAdd(p.state + UNRESOLVED, 1ull);
    return false;
  }
  *const_cast<C_TYPE*>(p.result(line, j)) = made;
  if (p.cast != nullptr)
    p.cast[p.within(line, p.d_step, p.d_rs) + j * p.d_cs] = narrowed(widened(made), D_TYPE());
  if (ordinary) return false;
  const Bits number = atomicAdd(p.state + WRONG, 1ull);
  if (number >= LOG) return true;
  Bits* log = p.fixed->log + 3 * number;
  log[0] = Bits(j) << 32 | Bits(line);
  log[1] = same_bits<Bits>(found);
  log[2] = same_bits<Bits>(value);
  return true;
}

// The columns of a group that are computed again: its candidates, or all.
INLINE int count_of(const Problem& p, int g, What what) {
  return what == ALL ? int(p.n) : int(__ldcg(p.fixed->candidates + g));
}
INLINE Index column_at(const Problem& p, int g, int c, What what) {
  return what == ALL ? Index(c) : Index(__ldcg(p.columns(g) + c));
}

// The sums over the warps of a block of element x of `count`.
INLINE void add_warps(const double* pool, int count, int x, double& sum, double& size) {
  sum = size = 0;
  for (int w = 0; w < WARPS; w++) {
    sum += pool[(w * count + x) * 2];
    size += pool[(w * count + x) * 2 + 1];
  }
}

// What the warps of a block have of ROWS x COLUMNS elements, from line `place` and candidate `at` on, is judged.
template <int ROWS, int COLUMNS>
INLINE void judge_all(const Problem& p, int g, int place, int at, What what, const double* pool) {
  const int last = p.first(g + 1), candidates = count_of(p, g, what);
  for (int x = threadIdx.x; x < ROWS * COLUMNS; x += T1) {
    const int i = place + x / COLUMNS, c = at + x % COLUMNS;
    if (i >= last || c >= candidates) continue;
    double sum, size;
    add_warps(pool, ROWS * COLUMNS, x, sum, size);
    const Index j = column_at(p, g, c, what);
    if (!judge(p, p.line(i), j, sum, size, __ldcg(p.fixed->usual + g), what) || what != OUTLIERS) continue;
    if (!p.all) atomicAdd(p.fixed->hits + i, 1u);
    atomicAdd(p.column_hits(g) + j, 1u);
  }
}

// pool = the sums of each warp of L(line, :) R(:, j) and of the magnitudes, for ROWS lines and COLUMNS columns of one
// product; the threads of a block share l.
template <int ROWS, int COLUMNS>
INLINE void multiply_elements(const Problem& p, const Index (&lines)[ROWS], const Index (&columns)[COLUMNS],
                              double* pool) {
  const A_TYPE *left[ROWS], *right[COLUMNS];
  const Index product = p.product_of(lines[0]), k = p.k, along = T1 * p.l_cs, down = T1 * p.r_rs;
  double sum[ROWS * COLUMNS * 2];
#pragma unroll
  for (int x = 0; x < ROWS * COLUMNS * 2; x++) sum[x] = 0;
#pragma unroll
  for (int i = 0; i < ROWS; i++) left[i] = p.left(lines[i]) + threadIdx.x * p.l_cs;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
    right[c] = p.right(product, columns[c]) + threadIdx.x * p.r_rs;
#pragma unroll(ROWS * COLUMNS <= SHARE ? 8 : 4)
  for (Index l = threadIdx.x; l < k; l += T1) {
    double x[ROWS], r[COLUMNS];
#pragma unroll
    for (int i = 0; i < ROWS; i++, left[i - 1] += along) x[i] = widened(*left[i]);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++, right[c - 1] += down) r[c] = widened(*right[c]);
#pragma unroll
    for (int y = 0; y < ROWS * COLUMNS; y++) {
      sum[2 * y] += x[y / COLUMNS] * r[y % COLUMNS];
      sum[2 * y + 1] += fabs(x[y / COLUMNS] * r[y % COLUMNS]);
    }
  }
#pragma unroll
  for (int x = 0; x < ROWS * COLUMNS * 2; x++) {
    const double total = over_lanes(sum[x]);
    if (threadIdx.x % 32 == 0) pool[threadIdx.x / 32 * (ROWS * COLUMNS * 2) + x] = total;
  }
  __syncthreads();
}

template <int ROWS, int COLUMNS>
INLINE void recompute(const Problem& p, int g, int place, int at, What what, double* pool) {
  const int last = p.first(g + 1) - 1, candidates = count_of(p, g, what);
  Index lines[ROWS], columns[COLUMNS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) lines[i] = p.line(min(place + i, last));
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) columns[c] = column_at(p, g, min(at + c, candidates - 1), what);
  multiply_elements<ROWS, COLUMNS>(p, lines, columns, pool);
  judge_all<ROWS, COLUMNS>(p, g, place, at, what, pool);
}

#if !TURNED
// A column a lane, so that neighbouring ones are read together; the warps share l, 32 of them at a time.
INLINE void recompute_wide(const Problem& p, int g, int place, int at, What what, double* pool) {
  constexpr int LOADS = !TUNED ? 8 : sizeof(A_TYPE) == 4 ? 32 : 16;
  const int last = p.first(g + 1) - 1, candidates = count_of(p, g, what);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index share = pieces(pieces(p.k, 32), WARPS) * 32, end = smaller((warp + 1) * share, p.k);
  const Index along = p.l_cs, down = p.r_rs;
  const A_TYPE* right = p.right(p.product_of(p.line(place)), column_at(p, g, min(at + lane, candidates - 1), what)) +
                        warp * share * down;
  const A_TYPE* left[SHARE];
  double sum[SHARE][2];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    left[i] = p.left(p.line(min(place + i, last)));
    sum[i][0] = sum[i][1] = 0;
  }
  A_TYPE next[LOADS], next_left[SHARE];
  auto fetch_left = [&](Index l) {
#pragma unroll
    for (int i = 0; i < SHARE; i++) next_left[i] = l + lane < end ? left[i][(l + lane) * along] : A_TYPE();
  };
  auto fetch = [&](Index l) {  // R(l : l + LOADS, the lane's column), while what was fetched before is multiplied
#pragma unroll
    for (int a = 0; a < LOADS; a++, right += down) next[a] = l + a < end ? *right : A_TYPE();
  };
  fetch_left(warp * share);
  fetch(warp * share);
#pragma unroll 1
  for (Index l = warp * share; l < end; l += 32) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SHARE; i++) pool[(warp * 32 + lane) * SHARE + i] = double(widened(next_left[i]));
    __syncwarp();
    fetch_left(l + 32);
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += LOADS) {
      A_TYPE r[LOADS];
#pragma unroll
      for (int a = 0; a < LOADS; a++) r[a] = next[a];
      fetch(l + begin + LOADS);
#pragma unroll
      for (int a = 0; a < LOADS; a++)
#pragma unroll
        for (int i = 0; i < SHARE; i += 2) {
          const double2 x = *reinterpret_cast<const double2*>(&pool[(warp * 32 + begin + a) * SHARE + i]);
          const double y = x.x * double(widened(r[a])), z = x.y * double(widened(r[a]));
          sum[i][0] += y;
          sum[i][1] += fabs(y);
          sum[i + 1][0] += z;
          sum[i + 1][1] += fabs(z);
        }
    }
  }
  __syncthreads();  // the pool is for sums from here on
#pragma unroll
  for (int x = 0; x < SHARE * 2; x++) pool[((warp * SHARE + x / 2) * 32 + lane) * 2 + x % 2] = sum[x / 2][x % 2];
  __syncthreads();
  judge_all<SHARE, 32>(p, g, place, at, what, pool);
}
#endif

// A line is wrong all over where an element is and what is usual is not usual for rounding: then there is an error in
// many columns, most of them too small for a fault.
INLINE bool is_whole(const Problem& p, int g, int place) {
  return !p.all && __ldcg(p.fixed->hits + place) > 0 && __ldcg(p.fixed->usual + g) > OUTLIER / 2;
}
INLINE bool any_whole(const Problem& p, int g, int place, int rows) {
  bool found = false;
  for (int i = place; i < min(place + rows, p.first(g + 1)); i++) found = found || is_whole(p, g, i);
  return found;
}

// How many columns of a group are computed together, and in how many items all of them are.
INLINE int together(Index lines, Index candidates) {
  return lines * candidates <= FEW ? 1 : !TURNED && candidates > 8 ? 32 : PAIR;
}
INLINE Index items_of_group(const Problem& p, int g, What what) {
  if (what == ALL && __ldcg(p.fixed->whole + g) == 0) return 0;
  const Index lines = p.first(g + 1) - p.first(g), candidates = count_of(p, g, what);
  const int columns = together(lines, candidates);
  return pieces(lines, columns == 1 ? 1 : SHARE) * pieces(candidates, columns);
}

INLINE void recompute_any(const Problem* problem, Index item, What what, double* pool) {
  const Problem& p = problem[0];
  int g = 0;
  for (Index items = items_of_group(p, 0, what); item >= items; items = items_of_group(p, ++g, what)) item -= items;
  const int lines = p.first(g + 1) - p.first(g), columns = together(lines, count_of(p, g, what));
  const int rows = columns == 1 ? 1 : SHARE, strips = int(pieces(lines, rows));
  const int place = p.first(g) + int(item % strips) * rows, at = int(item / strips) * columns;
  if (what == ALL && !any_whole(p, g, place, rows)) return;
  if (columns == 1) recompute<1, 1>(p, g, place, at, what, pool);
  if (columns == PAIR) recompute<SHARE, PAIR>(p, g, place, at, what, pool);
#if !TURNED
  if (columns == 32) recompute_wide(p, g, place, at, what, pool);
#endif
}

// ---- stages 2 and 14: |C(i, :) v - alpha t_i - beta t0_i| <= tau_i, as `bounds.statistical_bound` has it -------------------

// x and y summed over a block, for its first thread.
INLINE void add_up(double& x, double& y, double* pool) {
  x = over_lanes(x);
  y = over_lanes(y);
  if (threadIdx.x % 32 == 0) {
    pool[threadIdx.x / 32 * 2] = x;
    pool[threadIdx.x / 32 * 2 + 1] = y;
  }
  __syncthreads();
  for (int w = 1; w < WARPS && threadIdx.x == 0; w++) {
    x += pool[2 * w];
    y += pool[2 * w + 1];
  }
}

// What a line's check comes to, for the first thread of a block.
struct LineCheck {
  double predicted, tau;  // alpha t_i + beta t0_i, if these are what they were: else NaN, which nothing agrees with
  bool fine;
};

INLINE LineCheck check_line(const Problem& p, Index line, double* pool) {
  const Index product = p.product_of(line), n = p.n, apart = p.c_cs;
  const ACC* v = p.v + product * p.v_step;
  const C_TYPE* row = p.result(line, 0);
  double u = 0, squares = 0;
#pragma unroll(TUNED ? 16 : 8)
  for (Index j = threadIdx.x; j < n; j += T1) {
    const double x = fresh(row + j * apart) * double(v[j]);
    u += x;
    squares += x * x;
  }
  add_up(u, squares, pool);
  if (threadIdx.x > 0) return {0, 0, true};
  // t, if it is what it was: what agrees with a t that was lost is not known to be right.
  const double t = guarded(p.t[line], p.p2[line], line, p.encoded, p.guards[line]);
  const double t0 = p.t0 != nullptr ? guarded(p.t0[line], p.added2[line], line, p.encoded, p.guards0[line]) : 0.0;
  const double predicted = p.alpha * t + p.beta * t0, residual = fabs(u - p.alpha * t - p.beta * t0);
  const double least = p.underflow * p.sizes[p.v_step ? 2 * product : 0];
  const double products = fabs(p.alpha) * sqrt(p.p2[line]);
  const double added = p.added2 != nullptr ? fabs(p.beta) * sqrt(p.added2[line]) : 0.0;
  const double norm = sqrt(squares), largest = p.k_root * products + 1.01 * added + least;
  const double stored = norm < largest ? norm : largest, scale = products > added ? products : added;
  const double tau =
      p.factor * (scale > stored ? scale : stored) + p.input_factor * products + p.out_factor * (stored + added) + least;
  return {predicted, tau, residual <= tau && tau >= FAINTEST && finite(tau) && norm <= largest};
}

// alpha L_i R v + beta C0_i v of a line that is the only one of its group, by the product of stage 5, for the first thread
// of a block: what L, R and C0 as they are now predict.
INLINE double predicted_now(const Problem& p, Index line, int g, double* pool) {
  const ACC* v = p.v + p.product_of(line) * p.v_step;
  double sum = 0, none = 0;
#pragma unroll 1
  for (Index j = threadIdx.x; j < p.n; j += T1) {
    const double c0 = p.beta != 0 ? p.beta * fresh(p.added(line, j)) : 0.0;
    sum += (p.alpha * __ldcg(p.product_sum(g, j)) + c0) * double(v[j]);
  }
  __syncthreads();  // the pool has been read
  add_up(sum, none, pool);
  return sum;
}

// Stage 14 is about the flagged lines, and about all of products of which columns were completed: what was replaced in
// them has to agree with what was encoded, too.
INLINE Index lines_verified(const Problem& p) { return p.flagged + (p.all ? 0 : lines_of_products(p)); }

// In stage 2, the lines that fail are listed.
INLINE void list_failing(const Problem* problem, Index item, double* pool) {
  const Problem& p = problem[0];
  const Index line = p.lines[item];
  const bool fine = check_line(p, line, pool).fine;
  if (threadIdx.x > 0 || fine) return;
  const Bits number = atomicAdd(p.state + REMAINING, 1ull);
  if (number < CAP) p.fixed->remaining[number] = unsigned(line);
}

INLINE void verify(const Problem* problem, Index item, double* pool) {
  const Problem& p = problem[0];
  const bool beside = item >= p.flagged, alone = !p.all && !beside && p.groups == p.flagged;
  const Index line = beside ? line_of_products(p, item - p.flagged) : p.line(int(item));
  const LineCheck check = check_line(p, line, pool);
  const double now = alone ? predicted_now(p, line, int(item), pool) : 0.0;
  if (threadIdx.x > 0) return;
  const bool touched = p.all || p.settled || beside || __ldcg(p.state + COMPLETED) || __ldcg(p.fixed->hits + item);
  // A line of its own that has no candidate, and no more rounding than is usual, is right element by element, if that is
  // the product of what was encoded: if the operands as they are now predict the same, to within the line's bound.
  const bool right = !check.fine && alone && __ldcg(p.fixed->candidates + item) == 0 &&
                     __ldcg(p.fixed->usual + item) <= 1 && fabs(now - check.predicted) <= check.tau && finite(check.tau);
  if (!check.fine || !touched) atomicAdd(p.state + (right ? CLEARED : UNRESOLVED), 1ull);
}
