// Counts every byte that torch's CPU allocator hands out and takes back.
//
// It stands in front of the allocator that was there, which still does the work: the
// events that torch's profiler sees stay what they are.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, std::int64_t> sizes;
std::int64_t live_bytes = 0;
std::int64_t most_bytes = 0;
c10::Allocator* inner = nullptr;

void release(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes.find(memory);
    if (found != sizes.end()) {
      live_bytes -= found->second;
      sizes.erase(found);
    }
  }
  inner->raw_deallocate(memory);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = inner->raw_allocate(bytes);
    if (memory != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes[memory] = static_cast<std::int64_t>(bytes);
      live_bytes += static_cast<std::int64_t>(bytes);
      most_bytes = std::max(most_bytes, live_bytes);
    }
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" void install() {
  static Counter counter;
  if (inner == nullptr) {
    inner = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counter, /*priority=*/200);
  }
}

// Start again: the most bytes so far are those that live now.
extern "C" std::int64_t restart() {
  std::lock_guard<std::mutex> lock(mutex);
  most_bytes = live_bytes;
  return live_bytes;
}

extern "C" std::int64_t most() {
  std::lock_guard<std::mutex> lock(mutex);
  return most_bytes;
}
