// Sees when operations begin and end on a CUDA device, without making the job wait.
//
// Whoever launches a kernel of an operation records an event on its stream before and after it. A
// thread of its own queries the oldest event of each stream, without the GIL, and completes the
// operation's record. Not the calling thread, because a query may block when a device's queue is
// full.
//
// - Launches of one stream end in order, so only the oldest is asked about; those of other streams
//   do not wait for it.
// - Operations that are launched together form a group and share its launches: each begins with the
//   first and ends with the last of them.
// - Events come from a free list for each context and are never destroyed: destroying one may block
//   while the device is stuck.
// - The thread has the context of the events it queries, so that it creates none, and ignores graph
//   captures of other threads, which a query would break.
// - An operation of which no launch was seen is neither ended nor waited for: its record is marked
//   UNOBSERVED.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "device_clock.h"
#include "driver.h"
#include "lane.h"
#include "slab.h"

namespace keepstep {

// An event in a stream.
struct Mark {
  Context context = nullptr;
  Stream stream = nullptr;
  Event event = nullptr;
  double recorded_s = 0.0;  // Before the call: it cannot have completed earlier.
};

// The base of what NCCL holds a pointer to.
struct Handle {
  enum class Kind : uint8_t { GROUP, LAUNCH };
  explicit Handle(Kind its) : kind(its) {}
  const Kind kind;
};

// An operation that is called, or has not ended on the device.
struct Operation {
  Ticket ticket;
  int groups = 0;       // That it belongs to and that are not over.
  int open_groups = 0;  // Of these, those in which more may still be called and launched.
  bool is_launched = false;
  bool has_returned = false;
  bool has_started = false;
  bool is_over = false;  // Its record is complete.
  uint8_t flags = 0;
  double ended_s = 0.0;
  Operation* next = nullptr;
};

// Operations that are launched together.
struct Group : Handle {
  Group() : Handle(Kind::GROUP) {}
  enum class State : uint8_t { FREE, OPEN, CLOSED };
  State state = State::FREE;
  bool is_captured = false;
  // With non-blocking communicators another thread launches, perhaps after the group is closed.
  bool is_launched_elsewhere = false;
  bool is_overdue = false;  // Closed before all its launches were seen: the watch has it in a list.
  std::thread::id opened_by;
  size_t calls = 0;
  size_t launches = 0;
  size_t in_flight = 0;  // Of these, those that have not ended.
  double changed_s = 0.0;
  std::vector<Operation*> operations;
  Group* next = nullptr;
};

// The launch of a kernel, between two events.
struct Launch : Handle {
  Launch() : Handle(Kind::LAUNCH) {}
  Group* group = nullptr;
  Mark began, ended;
  bool has_begun = false;
  double pending_s = 0.0;  // When the event that is due was last seen not to have completed.
  Launch* next = nullptr;
};

class DeviceWatch {
 public:
  // Never destroyed: NCCL's threads may call while the process exits.
  static DeviceWatch& get();

  // The operation that this thread is calling, if any.
  static Operation*& calling();

  // Returns an operation, to be given back by `returned`.
  Operation* begin(Ticket ticket);
  // Tells that the call has returned; `has_failed`: by an exception.
  void returned(Operation* operation, bool has_failed);
  // Whether a launch of it was seen; nothing while one may still come in the same thread.
  std::optional<bool> is_launched(const Operation* operation);

  // Records an event on a stream; nothing if a graph is captured there, or the driver refuses.
  std::optional<Mark> record(Stream stream);
  // Gives back an event that nobody needs.
  void drop(const Mark& mark);
  // Adds a launch between two events to an operation.
  void bracket(Operation* operation, const Mark& before, const Mark& after);

  // What the profiler plugin of NCCL tells.
  Group* open_group(bool is_captured);
  void join(Group* group, Operation* operation);
  void close_group(Group* group);
  // Returns null if the launch is not to be observed; else it is given to `end_launch`.
  Launch* begin_launch(Group* group, Stream stream);
  void end_launch(Launch* launch);

  // Number of events created so far.
  size_t created_events();

 private:
  struct Queue {
    Context context = nullptr;
    Stream stream = nullptr;
    Launch* oldest = nullptr;
    Launch* newest = nullptr;
    double last_s = 0.0;  // Of the last event that completed: later ones are not earlier.
  };

  enum class Outcome : uint8_t { PENDING, BEGUN, ENDED, LOST, FAILED };
  struct Look {
    Outcome outcome;
    double at_s;
  };

  DeviceWatch() = default;

  Launch* new_launch(Group& group, const Mark& began);
  void enqueue(Launch& launch);
  Event take_event(const Driver& driver, Context context);

  void start_thread();
  void run();
  static void stop();
  double poll(std::unique_lock<std::mutex>& lock);
  void poll_stream(Queue& queue, std::unique_lock<std::mutex>& lock);
  Look look(Queue& queue, Launch& launch);
  Look look_at(Queue& queue, const Mark& mark, double pending_s, Outcome completed);

  void close_overdue_groups();
  void settle(Launch& launch, const Look& seen);
  void finish_if_over(Group& group);
  void finish(Group& group);
  void settle(Operation& operation);
  bool has_work() const;

  // Guards all that follows, except what is said to belong to the thread.
  std::mutex mutex_;
  std::condition_variable wake_, stopped_;
  Slab<Operation, 64> operations_;
  Slab<Group, 4096> groups_;
  Slab<Launch, 64> launches_;
  std::map<Context, std::vector<Event>> free_events_;
  size_t created_events_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
  size_t queued_ = 0;  // Launches in them.
  std::vector<Group*> overdue_;  // Closed groups whose launches have not all been seen.
  bool is_running_ = false;
  bool is_idle_ = false;
  bool is_stopping_ = false;
  bool has_stopped_ = false;
  int process_ = 0;

  // Of the thread.
  std::map<Context, DeviceClock> clocks_;
  Context context_ = nullptr;
};

}  // namespace keepstep
