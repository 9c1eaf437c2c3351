// Page-locked host memory: what the link copies to and from while the host goes on.
//
// A block that was freed while copies were queued on it lives until they have run. Fresh
// memory is poison, so that whoever reads what a copy has yet to bring reads NaN.

#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "memory.h"

namespace emulated {

struct PinnedBlock {
  char* start;
  size_t size;
  std::vector<Position> until = {};
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock;
    free_passed();
    const size_t size = rounded(std::max<size_t>(bytes, 1), 64);
    auto* start = static_cast<char*>(std::aligned_alloc(64, size));
    TORCH_CHECK(start != nullptr, "the host has no ", size, " bytes to lock");
    auto* block = new PinnedBlock{start, size};
    if (settings.poison) std::memset(block->start, poison_byte, size);
    live_[block->start] = block;
    stats_.active_bytes.increase(size);
    stats_.allocated_bytes.increase(size);
    return {block->start, block, &PinnedMemory::release, c10::Device(at::kCPU)};
  }

  // The block that an address lies in, if it is page-locked.
  PinnedBlock* find(const void* address) {
    Lock lock;
    auto next = live_.upper_bound(static_cast<const char*>(address));
    if (next == live_.begin()) return nullptr;
    auto* block = std::prev(next)->second;
    return address < block->start + block->size ? block : nullptr;
  }

  bool record_event(void* data, void* /*context*/, c10::Stream stream) override {
    Lock lock;
    auto* block = find(data);
    if (block)
      block->until.push_back(queues.end_of(stream.device_index(), stream.id()));
    return block;
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  void empty_cache() override {
    Lock lock;
    free_passed();
  }
  at::HostStats get_stats() override { return stats_; }
  void reset_accumulated_stats() override { stats_.active_bytes.reset_accumulated(); }
  void reset_peak_stats() override { stats_.active_bytes.reset_peak(); }

 private:
  static void release(void* context);

  void free_passed() {
    for (auto* block : std::exchange(passing_, {})) {
      const auto passed = [](const Position& p) { return queues.is_done(p); };
      if (!std::all_of(block->until.begin(), block->until.end(), passed)) {
        passing_.push_back(block);
        continue;
      }
      for (const auto& position : block->until) queues.run(position);
      stats_.allocated_bytes.decrease(block->size);
      std::free(block->start);
      delete block;
    }
  }

  std::map<const char*, PinnedBlock*> live_;
  std::vector<PinnedBlock*> passing_;
  at::HostStats stats_;
};

inline PinnedMemory& pinned_memory = *new PinnedMemory;

inline void PinnedMemory::release(void* context) {
  Lock lock;
  auto* block = static_cast<PinnedBlock*>(context);
  pinned_memory.live_.erase(block->start);
  pinned_memory.stats_.active_bytes.decrease(block->size);
  pinned_memory.passing_.push_back(block);
  pinned_memory.free_passed();
}

}  // namespace emulated
