// The device's memory: CUDA's caching allocator, with a limit and with poison.
//
// Blocks are cut from segments, as `CUDACachingAllocator` does it, so that allocated and
// reserved bytes differ as they do there, and a segment of which one block is in use
// cannot go back:
//
//     requested            allocated (512 bytes)    cut from a segment of
//     up to 1 MiB          rounded up               2 MiB, shared by such blocks
//     up to 10 MiB         rounded up               20 MiB, shared by such blocks
//     more                 rounded up               the size, rounded up to 2 MiB
//
// The sizes scale with `segment_bytes`, 2 MiB there, so that small models show them too.
// With 0 a block is a segment of the bytes requested, and no more reserved once it is
// freed: bytes are then those of tensors, as on the CPU.
//
// A block is free, for its own stream, as soon as its tensor dies: the stream's order
// protects it. Another stream that uses it must be named by `record_stream`; the block
// then waits until that stream has passed. A freed block is filled with NaN in the order
// of its stream, so that whoever forgot `record_stream` reads NaN or another's values.

#pragma once

#include "blocks.h"

namespace emulated {

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    const c10::Device place(device_type, static_cast<c10::DeviceIndex>(device));
    if (!bytes) return {nullptr, place};
    Lock lock;
    check_planned_failure(bytes);
    auto& pool = pools_[device];
    release_passed(pool);
    auto* block = settings.segment_bytes ? take(pool, rounded(bytes, smallest_block), bytes)
                                         : take_alone(pool, bytes);
    block->requested = bytes;
    ++allocations;
    count(pool.stats, *block, 1);
    count_active(pool.stats, *block, 1);
    report(*block, static_cast<int64_t>(block->size));
    return {block->start, block, &Memory::release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    queues.synchronize_device(current_device);
    std::memcpy(to, from, bytes);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    auto* block = static_cast<Block*>(data.get_context());
    if (block && block->stream != stream.id()) block->used_by.insert(stream.id());
  }

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    Lock lock;
    for (auto& [device, pool] : pools_) return_segments(device, pool);
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    release_passed(pools_[device]);
    return pools_[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    const size_t total = settings.limit_bytes ? settings.limit_bytes : size_t(1) << 40;
    const size_t taken = reserved(pools_[device].stats);
    return {total - std::min(total, taken), total};
  }

  int64_t allocations = 0;  // Since `configure`.
  size_t most_reserved = 0;  // By any device since then, whoever resets peaks.

 private:
  struct Pool {
    std::map<Kind, Free> free;
    std::vector<Block*> passing;  // Freed, but another stream has yet to pass.
    DeviceStats stats;
  };

  void report(const Block& block, int64_t change) {
    const auto& stats = pools_[block.device].stats;
    c10::reportMemoryUsageToProfiler(
        block.start, change, stats.allocated_bytes[0].current,
        stats.reserved_bytes[0].current,
        c10::Device(device_type, static_cast<c10::DeviceIndex>(block.device)));
  }

  void check_planned_failure(size_t bytes) {
    if (settings.fail_at && allocations + 1 == settings.fail_at) {
      ++allocations;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "emu out of memory, as planned: allocation ",
          allocations, ", of ", bytes, " bytes");
    }
  }

  // A free block of this stream, the smallest that is large enough, or a new segment.
  Block* take(Pool& pool, size_t size, size_t requested) {
    const bool small = size <= settings.segment_bytes / 2;
    const auto kind = small ? Kind::small : Kind::large;
    auto& free = pool.free[kind];
    auto* block = smallest(free, size);
    if (!block) {
      const size_t unit = settings.segment_bytes;
      const size_t bytes = small ? unit : size < 5 * unit ? 10 * unit : rounded(size, unit);
      reserve(pool, bytes, requested);
      block = new_segment(bytes, kind);
    }
    const size_t rest = block->size - size;
    if (rest >= (small ? smallest_block : settings.segment_bytes / 2 + 1))
      cut(free, block, size);
    return block;
  }

  // A block that is a segment. Freed ones of this size serve again.
  Block* take_alone(Pool& pool, size_t size) {
    reserve(pool, size, size);
    auto* block = smallest(pool.free[Kind::alone], size, size);
    return block ? block : new_segment(size, Kind::alone);
  }

  // Take the smallest free block of this stream that is large enough out of the free ones.
  static Block* smallest(Free& free, size_t size, size_t most = SIZE_MAX) {
    const auto stream = current_stream(current_device);
    auto found = free.lower_bound({stream, size, 0, nullptr});
    if (found == free.end()) return nullptr;
    auto* block = found->second;
    if (block->stream != stream || block->size > most) return nullptr;
    free.erase(found);
    return block;
  }

  // Count a segment, if the limit allows it.
  void reserve(Pool& pool, size_t bytes, size_t requested) {
    size_t limit = settings.limit_bytes ? settings.limit_bytes : SIZE_MAX;
    if (settings.allowed_bytes) limit = std::min(limit, settings.allowed_bytes);
    const auto fits = [&] { return reserved(pool.stats) + bytes <= limit; };
    if (!fits()) {
      ++pool.stats.num_alloc_retries;
      return_segments(current_device, pool);
    }
    if (!fits()) {
      ++pool.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "emu out of memory. Tried to allocate ", requested,
          " bytes, for which a segment of ", bytes, " is needed. Of ",
          limit, " bytes, ", reserved(pool.stats), " are reserved and ",
          pool.stats.allocated_bytes[0].current, " allocated.");
    }
    count_segment(pool.stats, bytes, 1);
    most_reserved = std::max(most_reserved, reserved(pool.stats));
  }

  Block* new_segment(size_t bytes, Kind kind) {
    auto* start = static_cast<char*>(std::aligned_alloc(64, rounded(bytes, 64)));
    TORCH_CHECK_WITH(OutOfMemoryError, start, "the host has no ", bytes, " bytes");
    if (settings.poison) std::memset(start, poison_byte, bytes);
    return new Block{
        start, bytes, kind, current_device, current_stream(current_device), ++segments_};
  }

  static void release(void* context);

  // Let the stream have the block again.
  void free_block(Pool& pool, Block* block) {
    count_active(pool.stats, *block, -1);
    if (settings.poison) {
      Launch fill;
      fill.work = [start = block->start, size = block->size] {
        std::memset(start, poison_byte, size);
      };
      fill.by_host = false;
      queues.launch(block->device, block->stream, std::move(fill));
    }
    if (block->kind == Kind::alone) count_segment(pool.stats, block->size, -1);
    join_free(pool.free[block->kind], block);
  }

  // Free the blocks whose other streams have passed, by the clocks.
  void release_passed(Pool& pool, bool wait = false) {
    auto passing = std::exchange(pool.passing, {});
    for (auto* block : passing) {
      const auto passed = [](const Position& p) { return queues.is_done(p); };
      if (!wait && !std::all_of(block->until.begin(), block->until.end(), passed)) {
        pool.passing.push_back(block);
        continue;
      }
      for (const auto& position : block->until) queues.run(position);
      block->until.clear();
      free_block(pool, block);
    }
  }

  // Give back every segment that has no block in use, once its work has run.
  void return_segments(int device, Pool& pool) {
    release_passed(pool, true);
    for (const auto& end : queues.ends_of(device)) queues.run(end);
    for (auto& [kind, free] : pool.free) {
      for (auto it = free.begin(); it != free.end();) {
        auto* block = it->second;
        if (block->before || block->after) {
          ++it;
          continue;
        }
        it = free.erase(it);
        if (kind != Kind::alone) count_segment(pool.stats, block->size, -1);
        std::free(block->start);
        delete block;
      }
    }
  }

  template <class F>
  void each(int device, F action) {
    Lock lock;
    auto& s = pools_[device].stats;
    for (auto* stat :
         {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
          &s.active_bytes, &s.requested_bytes})
      action((*stat)[0]);
  }

  std::map<int, Pool> pools_;
  int64_t segments_ = 0;  // Ever made.
};

inline Memory& memory = *new Memory;

inline void Memory::release(void* context) {
  Lock lock;
  auto* block = static_cast<Block*>(context);
  auto& pool = memory.pools_[block->device];
  count(pool.stats, *block, -1);
  memory.report(*block, -static_cast<int64_t>(block->size));
  for (auto stream : std::exchange(block->used_by, {}))
    block->until.push_back(queues.end_of(block->device, stream));
  if (block->until.empty())
    memory.free_block(pool, block);
  else
    pool.passing.push_back(block);
}

}  // namespace emulated
