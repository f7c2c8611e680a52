// Shared memory: where arrays lie, and who wrote and read which element. See cuda_on_cpu.h.
#include "runtime.h"

#include <vector>

namespace cuda_on_cpu {

namespace {

constexpr std::size_t red_zone = 256;
constexpr std::size_t most_static = 48 << 10, most_shared = 227 << 10;  // of a block, on sm_90
constexpr std::size_t arena_bytes = most_shared + 64 * 2 * red_zone;
constexpr unsigned char canary = 0xC5;

char* arena;  // arrays one after the other, each between two red zones
std::size_t arena_used, static_bytes, dynamic_bytes;
char* dynamic_data;
Cell *cells, *dynamic_cells;
std::size_t cells_used;
std::vector<Declaration*> declared;  // in this block

bool is_poison(const char* at, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i++)
    if (static_cast<unsigned char>(at[i]) != poison(at + i)) return false;
  return true;
}

// Poisoned bytes between two red zones, and their cells.
char* lay_out(std::size_t bytes, std::size_t cell_count, Cell*& first_cell) {
  const std::size_t rounded = (bytes + 15) / 16 * 16;
  if (static_bytes > most_static || static_bytes + dynamic_bytes > most_shared ||
      arena_used + rounded + 2 * red_zone > arena_bytes) {
    begin_fault("too much shared memory", 0);
    add(": %zu bytes static (at most %zu), %zu dynamic (at most %zu together)", static_bytes, most_static,
        dynamic_bytes, most_shared);
    abandon();
  }
  char* start = arena + arena_used;
  char* data = start + red_zone;
  arena_used += rounded + 2 * red_zone;
  ASAN_UNPOISON_MEMORY_REGION(start, rounded + 2 * red_zone);
  std::memset(start, canary, rounded + 2 * red_zone);
  for (std::size_t i = 0; i < bytes; i++) data[i] = static_cast<char>(poison(data + i));
  ASAN_POISON_MEMORY_REGION(start, red_zone);
  ASAN_POISON_MEMORY_REGION(data + bytes, rounded - bytes + red_zone);
  first_cell = cells + cells_used;
  cells_used += cell_count;
  return data;
}

// The first byte of a red zone that was written, relative to the array; 0 for none (byte 0 is the array's own).
long long written_outside(const char* data, std::size_t bytes) {
  const std::size_t rounded = (bytes + 15) / 16 * 16;
  ASAN_UNPOISON_MEMORY_REGION(data - red_zone, red_zone);
  ASAN_UNPOISON_MEMORY_REGION(data + bytes, rounded - bytes + red_zone);
  for (std::size_t i = bytes; i < rounded + red_zone; i++)
    if (static_cast<unsigned char>(data[i]) != canary) return static_cast<long long>(i);
  for (std::size_t i = 1; i <= red_zone; i++)
    if (static_cast<unsigned char>(*(data - i)) != canary) return -static_cast<long long>(i);
  return 0;
}

bool ordered_before(unsigned other, std::uint32_t clock) {
  const Thread& me = *current;
  return other / warp_size == me.number / warp_size && me.known[other % warp_size] > clock;
}

void add_array(const Declaration& array, long long index) {
  add("%s[%lld] (%zu elements, %s:%d)", array.name, index, array.bytes / array.element, array.site.file,
      array.site.line);
}

long long index_of(const Declaration& array, const void* at) {
  return (static_cast<const char*>(at) - array.data) / array.element;
}

[[noreturn]] void race(const Declaration& array, const void* at, const char* mine, unsigned other, const char* theirs,
                       std::uintptr_t address) {
  begin_fault("race", address);
  add(" %s ", mine);
  add_array(array, index_of(array, at));
  add_place(", which thread", threads[other].index);
  add(" %s with no barrier between the two", theirs);
  add_last_barrier();
  abandon();
}

}  // namespace

bool reserve_shared() {
  if (!cells) cells = reinterpret_cast<Cell*>(pages(arena_bytes * sizeof(Cell)));
  if (!arena) arena = pages(arena_bytes);
  return cells && arena;
}

void begin_shared(std::size_t dynamic) {
  ASAN_UNPOISON_MEMORY_REGION(arena, arena_used);
  arena_used = cells_used = static_bytes = 0;
  declared.clear();
  dynamic_bytes = dynamic;
  dynamic_data = nullptr;
}

void check_red_zones() {
  for (const Declaration* array : declared) {
    const long long at = written_outside(array->data, array->bytes);
    if (at == 0) continue;
    begin_fault("shared memory overrun", 0);
    add(": byte %lld of %s (%zu bytes, %s:%d) was written through a raw pointer", at, array->name, array->bytes,
        array->site.file, array->site.line);
    return;
  }
}

void lay_out_static(Declaration& array, std::size_t bytes, unsigned element) {
  array.valid_from = block.first_epoch;
  array.bytes = bytes;
  array.element = element;
  array.cells_per_element = 1;
  static_bytes += bytes;
  array.data = lay_out(bytes, bytes / element, array.cells);
  declared.push_back(&array);
}

void lay_out_dynamic(Declaration& array, unsigned element) {
  if (!dynamic_data) dynamic_data = lay_out(dynamic_bytes, dynamic_bytes / 2, dynamic_cells);
  array.valid_from = block.first_epoch;
  array.data = dynamic_data;
  array.cells = dynamic_cells;
  array.bytes = dynamic_bytes;
  array.element = element;
  array.cells_per_element = element / 2;
  declared.push_back(&array);
}

void outside(const Declaration& array, long long index) {
  begin_fault("shared memory overrun", CALLER);
  add(" touches ");
  add_array(array, index);
  abandon();
}

void uninitialised_register(const Declaration& array, const void* at) {
  begin_fault("uninitialised register", CALLER);
  add(" stores one in ");
  add_array(array, index_of(array, at));
  abandon();
}

void note_read(const Declaration& array, Cell& cell, const void* at) {
  const Thread& me = *current;
  const unsigned warp = me.number / warp_size;
  const std::uint32_t now = block.clock[warp];
  if (cell.written_epoch < block.first_epoch && is_poison(static_cast<const char*>(at), array.element)) {
    begin_fault("uninitialised shared memory", CALLER);
    add(" reads ");
    add_array(array, index_of(array, at));
    add(", which no thread of this block has written");
    add_last_barrier();
    abandon();
  }
  if (cell.written_epoch == block.epoch && cell.writer != me.number && !ordered_before(cell.writer, cell.written_clock))
    race(array, at, "reads", cell.writer, "wrote", CALLER);
  bool first = cell.read_epoch != block.epoch;
  if (!first && cell.reader / warp_size != warp) {
    cell.other_reader = static_cast<std::uint16_t>(me.number);
    if (cell.written_epoch != block.epoch) cell.settled_epoch = block.epoch;
    return;
  }
  if (!first && cell.read_clock != now) {  // are all readers so far ordered before this one?
    first = true;
    for (unsigned lane = 0; lane < warp_size; lane++)
      if (cell.read_lanes >> lane & 1) first &= lane == me.lane || me.known[lane] > cell.read_clock;
  }
  if (first) {
    cell.read_epoch = block.epoch;
    cell.read_clock = now;
    cell.read_lanes = 0;
    cell.reader = cell.other_reader = static_cast<std::uint16_t>(me.number);
  }
  // Readers of one warp at two times, unordered: only with partial masks. The earlier time stands, which may miss a
  // race but never reports one that is none.
  cell.read_lanes |= 1u << me.lane;
}

void note_write(const Declaration& array, Cell& cell, const void* at, bool atomic) {
  const Thread& me = *current;
  const unsigned warp = me.number / warp_size;
  const char* mine = atomic ? "adds atomically to" : "writes";
  if (cell.written_epoch == block.epoch && cell.writer != me.number && !(atomic && cell.atomic) &&
      !ordered_before(cell.writer, cell.written_clock))
    race(array, at, mine, cell.writer, "wrote", CALLER);
  if (cell.read_epoch == block.epoch) {
    if (cell.reader / warp_size != warp) race(array, at, mine, cell.reader, "read", CALLER);
    if (cell.other_reader != cell.reader) race(array, at, mine, cell.other_reader, "read", CALLER);
    for (unsigned lane = 0; lane < warp_size; lane++)
      if ((cell.read_lanes >> lane & 1) && lane != me.lane && me.known[lane] <= cell.read_clock)
        race(array, at, mine, warp * warp_size + lane, "read", CALLER);
  }
  cell.read_epoch = 0;  // whoever is ordered after this write is ordered after those reads
  // An atomic addition after one's own plain write leaves that write as unordered as it was.
  const bool after_plain = cell.written_epoch == block.epoch && cell.writer == me.number && !cell.atomic;
  cell.atomic = atomic && !after_plain;
  cell.written_epoch = block.epoch;
  cell.written_clock = block.clock[warp];
  cell.writer = static_cast<std::uint16_t>(me.number);
}

void note_atomic(const void* at, unsigned size) {
  const char* byte = static_cast<const char*>(at);
  if (byte < arena || byte >= arena + arena_bytes) return;  // global memory
  for (const Declaration* array : declared) {
    if (byte < array->data || byte + size > array->data + array->bytes) continue;
    Cell* first = array->cells + index_of(*array, at) * array->cells_per_element;
    for (unsigned i = 0; i < array->cells_per_element; i++) {
      if (first[i].written_epoch < block.first_epoch && is_poison(byte, size)) note_read(*array, first[i], at);
      note_write(*array, first[i], at, true);
    }
    return;
  }
}

}  // namespace cuda_on_cpu
