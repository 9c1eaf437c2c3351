// What torch asks of any accelerator: the current device and stream, streams, events.

#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "pinned.h"
#include "random.h"

namespace emulated {

inline void check_device(int index) {
  TORCH_CHECK(
      index < device_count, "emu has ", device_count, " devices, and no emu:", index);
}

inline c10::Stream stream_of(int device, int64_t id) {
  const c10::Device place(device_type, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, place, id);
}

inline Position end_of(const c10::Stream& stream) {
  return queues.end_of(stream.device_index(), stream.id());
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  using Device = c10::Device;
  using Stream = c10::Stream;
  using Index = c10::DeviceIndex;

  c10::DeviceType type() const override { return device_type; }
  Device getDevice() const override {
    return Device(device_type, static_cast<Index>(current_device));
  }
  void setDevice(Device device) const override {
    check_device(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Index deviceCount() const noexcept override {
    return static_cast<Index>(device_count);
  }

  // The default stream is 0; the pool of torch.Stream's C++ users has 32.
  Stream getDefaultStream(Device device) const override {
    return stream_of(index_of(device), 0);
  }
  Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_stream(index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    static std::atomic<int64_t> next{0};
    return stream_of(index_of(device), 1 + next++ % 32);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{33};
    return stream_of(index_of(device), next++);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    return queues.query(end_of(stream));
  }
  void synchronizeStream(const Stream& stream) const override {
    queues.synchronize(end_of(stream));
  }
  void synchronizeDevice(const Index device) const override {
    queues.synchronize_device(device < 0 ? current_device : device);
  }

  void record(void** event, const Stream& stream, const Index, const c10::EventFlag)
      const override {
    if (!*event) *event = new Position;
    at(*event) = queues.recorded(stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) wait_for(stream.device_index(), stream.id(), at(event));
  }
  bool queryEvent(void* event) const override {
    return !event || queues.query(at(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) queues.synchronize(at(event));
  }
  double elapsedTime(void* first, void* second, const Index) const override {
    return static_cast<double>(at(second).time - at(first).time) / 1e9;
  }
  void destroyEvent(void* event, const Index) const noexcept override {
    delete static_cast<Position*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream)
      const override {
    memory.recordStream(data, stream);
  }

 private:
  static Position& at(void* event) { return *static_cast<Position*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  using Index = c10::DeviceIndex;

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return static_cast<Index>(device_count); }
  Index getCurrentDevice() const override { return static_cast<Index>(current_device); }
  void setCurrentDevice(Index device) const override {
    check_device(device);
    current_device = device;
  }
  Index exchangeDevice(Index device) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  Index maybeExchangeDevice(Index device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(device_type, getCurrentDevice());
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.find(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(Index device) const override {
    return default_generator(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(Index device) const override {
    return at::make_generator<Random>(device < 0 ? getCurrentDevice() : device);
  }

  // What `UntypedStorage.resize_` does: other memory, and a copy in the stream's order.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      Launch copy;
      copy.work = [to = data.get(), from = storage.data(), kept] {
        std::memcpy(to, from, kept);
      };
      copy.cost = picoseconds(2.0 * static_cast<double>(kept) / settings.bytes_per_s);
      launch(current_device, std::move(copy));
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

inline Hooks& hooks = *new Hooks;

}  // namespace emulated
