// Knows the process groups that operations are called on: their identity, ranks and numbers.

#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <bitset>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lane.h"
#include "operators.h"

namespace keepstep {

// Calls Python to describe a process group: sets its identity and the global ranks of its `size`
// members.
using Describe = void (*)(const char* name, int32_t group_rank, int32_t size, uint32_t* identity,
                          int32_t* ranks);

// Where the end of a group's operations can be seen.
enum class Seen : uint8_t {
  // By the work's future, or when it is waited for: threads of the host carry it out.
  ON_HOST,
  // On the device, by events; operations that return no work ran on the current stream.
  ON_NCCL_STREAM,
  // On the device, if its library reports launches.
  ON_DEVICE,
  // Nowhere: the device's events are not known here, so only the call is recorded.
  NOWHERE,
};

// What outlives a process group: one that is created again with the same name and ranks continues
// its numbers, on every rank.
struct Counters {
  uint64_t collectives = 0;
  std::map<std::pair<bool, int32_t>, uint64_t> pairs;
  // Whether a launch was seen for the last operation on a device.
  std::atomic<bool> is_launch_seen{true};
};

struct Communicator {
  // A weak reference: it does not keep the group alive, but its address is not reused while it is a
  // key.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  uint32_t identity = 0;
  std::vector<int32_t> ranks;
  std::shared_ptr<Counters> counters;
  // Operators whose works have no future in this group. Finding out costs an exception, so it is
  // tried once.
  std::bitset<PLANS.size()> without_future;
  std::map<c10::DeviceType, Seen> seen;
};

// Returns where the operations of a group on tensors of a device are seen.
inline Seen where_seen(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (device == c10::kCPU) return Seen::ON_HOST;
  try {
    const std::string name = group.getBackend(device)->getBackendName();
    if (name == "gloo" || name == "mpi") return Seen::ON_HOST;
    if (device != c10::kCUDA) return Seen::NOWHERE;
    return name == "nccl" ? Seen::ON_NCCL_STREAM : Seen::ON_DEVICE;
  } catch (const std::exception&) {
    return device == c10::kCUDA ? Seen::ON_DEVICE : Seen::NOWHERE;
  }
}

// The process's communicators and the lane in use. `mutex` guards all of it.
struct Recorder {
  std::mutex mutex;
  std::shared_ptr<Lane> lane;
  Describe describe = nullptr;
  std::unordered_map<c10d::ProcessGroup*, Communicator> communicators;
  std::unordered_map<uint32_t, std::shared_ptr<Counters>> counters;

  // Never destroyed: threads of backends may end operations while the process exits.
  static Recorder& get() {
    static auto* const it = new Recorder;
    return *it;
  }

  // Adds a group, unless it is there. Takes the GIL the first time, and then no lock is held.
  void add(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    Describe describing = nullptr;
    {
      const std::lock_guard lock(mutex);
      if (communicators.count(group.get()) != 0) return;
      describing = describe;
    }
    uint32_t identity = 0;
    std::vector<int32_t> ranks(group->getSize(), -1);
    if (describing != nullptr) {
      describing(group->getGroupName().c_str(), group->getRank(), group->getSize(), &identity,
                 ranks.data());
    }
    const std::lock_guard lock(mutex);
    for (auto at = communicators.begin(); at != communicators.end();) {
      at = at->second.group.expired() ? communicators.erase(at) : std::next(at);
    }
    auto& known = counters[identity];
    if (!known) known = std::make_shared<Counters>();
    communicators.try_emplace(
        group.get(), Communicator{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), identity,
                                  std::move(ranks), known, {}, {}});
  }

  // Returns a group that was added; null if it was removed. Call with `mutex` held.
  Communicator* find(c10d::ProcessGroup* group) {
    const auto entry = communicators.find(group);
    return entry == communicators.end() ? nullptr : &entry->second;
  }
};

}  // namespace keepstep
