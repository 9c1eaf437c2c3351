// Blocks of the device's memory, neighbours in a segment, and how they are counted.

#pragma once

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include <c10/core/CachingDeviceAllocator.h>

#include "queue.h"

namespace emulated {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr int poison_byte = 0xFF;  // A NaN in each floating type.
constexpr size_t smallest_block = 512;

inline size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// By its size: what it is cut from, or that it is a segment.
enum class Kind { small, large, alone };

struct Block {
  char* start;
  size_t size;
  Kind kind;
  int device;
  int64_t stream;
  int64_t segment;  // Its number.
  size_t requested = 0;
  Block* before = nullptr;  // Neighbours in the segment.
  Block* after = nullptr;
  std::set<int64_t> used_by = {};  // Other streams, by `record_stream`.
  std::vector<Position> until = {};
};

// The free blocks of a device: by stream, then by size. Of equal ones CUDA takes that with
// the lowest address; here it is that of the oldest segment, so that runs are alike.
using Key = std::tuple<int64_t, size_t, int64_t, char*>;
using Free = std::map<Key, Block*>;

inline Key key(const Block& block) { 
  return {block.stream, block.size, block.segment, block.start};
}

// Cut a block to a size; the rest is free.
inline void cut(Free& free, Block* block, size_t size) {
  auto* rest = new Block{
      block->start + size, block->size - size, block->kind, block->device, block->stream,
      block->segment};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->size = size;
  free.emplace(key(*rest), rest);
}

inline void join(Block* block, Block* next) {
  block->size += next->size;
  block->after = next->after;
  if (block->after) block->after->before = block;
  delete next;
}

// Free a block; free neighbours become one.
inline void join_free(Free& free, Block* block) {
  if (auto* next = block->after; next && free.erase(key(*next))) join(block, next);
  if (auto* last = block->before; last && free.erase(key(*last))) {
    join(last, block);
    block = last;
  }
  free.emplace(key(*block), block);
}

inline void change(c10::CachingAllocator::StatArray& stat, int64_t by) {
  by < 0 ? stat[0].decrease(-by) : stat[0].increase(by);
}

inline void count(DeviceStats& stats, const Block& block, int sign) {
  change(stats.allocation, sign);
  change(stats.allocated_bytes, sign * static_cast<int64_t>(block.size));
  change(stats.requested_bytes, sign * static_cast<int64_t>(block.requested));
}

inline void count_active(DeviceStats& stats, const Block& block, int sign) {
  change(stats.active, sign);
  change(stats.active_bytes, sign * static_cast<int64_t>(block.size));
}

inline void count_segment(DeviceStats& stats, size_t size, int sign) {
  change(stats.segment, sign);
  change(stats.reserved_bytes, sign * static_cast<int64_t>(size));
  ++(sign > 0 ? stats.num_device_alloc : stats.num_device_free);
}

inline size_t reserved(const DeviceStats& stats) {
  return static_cast<size_t>(stats.reserved_bytes[0].current);
}

}  // namespace emulated
