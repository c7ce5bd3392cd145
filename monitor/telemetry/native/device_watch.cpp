#include "device_watch.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

namespace keepstep {

namespace {

constexpr double OLD_S = 1.0;
constexpr double DUE_POLL_S = 0.001;
constexpr double OLD_POLL_S = 0.010;
// A launch that another thread makes comes within this time after the call, or not at all.
constexpr double LATE_LAUNCH_S = 1.0;
constexpr size_t KEPT_QUEUES = 64;
constexpr auto LONGEST_STOP = std::chrono::seconds(1);

// Returns whether a failed query says nothing about the device: the process or the context ends, or
// the event is not one to be queried.
bool is_lost(int result) {
  return result == Driver::DEINITIALIZED || result == Driver::INVALID_CONTEXT ||
         result == Driver::INVALID_HANDLE || result == Driver::CONTEXT_IS_DESTROYED ||
         (result >= Driver::FIRST_OF_CAPTURE && result <= Driver::LAST_OF_CAPTURE);
}

}  // namespace

DeviceWatch& DeviceWatch::get() {
  static auto* const it = new DeviceWatch;
  return *it;
}

Operation*& DeviceWatch::calling() {
  static thread_local Operation* it = nullptr;
  return it;
}

Operation* DeviceWatch::begin(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  Operation& operation = operations_.take();
  operation = Operation{};
  operation.ticket = std::move(ticket);
  return &operation;
}

void DeviceWatch::returned(Operation* operation, bool has_failed) {
  const std::lock_guard lock(mutex_);
  operation->has_returned = true;
  if (has_failed) {
    operation->is_over = true;
    operation->ticket.end(FAILED);
  }
  settle(*operation);
}

std::optional<bool> DeviceWatch::is_launched(const Operation* operation) {
  const std::lock_guard lock(mutex_);
  if (!operation->is_launched && operation->open_groups > 0) return std::nullopt;
  return operation->is_launched;
}

std::optional<Mark> DeviceWatch::record(Stream stream) {
  const Driver* const driver = Driver::get();
  if (driver == nullptr || driver->is_capturing(stream)) return std::nullopt;
  const Context context = driver->current_context();
  if (context == nullptr) return std::nullopt;
  const Event event = take_event(*driver, context);
  if (event == nullptr) return std::nullopt;
  const Mark mark{context, stream, event, now_s()};
  if (driver->record(event, stream) != Driver::SUCCESS) {
    drop(mark);
    return std::nullopt;
  }
  return mark;
}

void DeviceWatch::drop(const Mark& mark) {
  const std::lock_guard lock(mutex_);
  free_events_[mark.context].push_back(mark.event);
}

void DeviceWatch::bracket(Operation* operation, const Mark& before, const Mark& after) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_.take();
  group.state = Group::State::CLOSED;
  group.calls = 1;
  group.operations.push_back(operation);
  ++operation->groups;
  Launch* const launch = new_launch(group, before);
  launch->ended = after;
  enqueue(*launch);
}

Group* DeviceWatch::open_group(bool is_captured) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_.take();
  group.state = Group::State::OPEN;
  group.is_captured = is_captured;
  group.opened_by = std::this_thread::get_id();
  return &group;
}

void DeviceWatch::join(Group* group, Operation* operation) {
  const std::lock_guard lock(mutex_);
  ++group->calls;
  // One operation may make many calls, such as one for each peer.
  if (!group->operations.empty() && group->operations.back() == operation) return;
  group->operations.push_back(operation);
  ++operation->groups;
  ++operation->open_groups;
}

void DeviceWatch::close_group(Group* group) {
  const std::lock_guard lock(mutex_);
  for (Operation* const operation : group->operations) --operation->open_groups;
  group->state = Group::State::CLOSED;
  group->changed_s = now_s();
  finish_if_over(*group);
  if (group->state == Group::State::FREE) return;
  if (group->launches > 0 && !group->is_launched_elsewhere) return;
  group->is_overdue = true;
  overdue_.push_back(group);
  start_thread();
}

Launch* DeviceWatch::begin_launch(Group* group, Stream stream) {
  {
    const std::lock_guard lock(mutex_);
    if (group->state == Group::State::FREE || group->is_captured) return nullptr;
    ++group->in_flight;  // It must not be over before this launch has ended.
  }
  const auto began = record(stream);
  const std::lock_guard lock(mutex_);
  --group->in_flight;
  if (!began) return nullptr;
  Launch* const launch = new_launch(*group, *began);
  if (std::this_thread::get_id() != group->opened_by) group->is_launched_elsewhere = true;
  return launch;
}

void DeviceWatch::end_launch(Launch* launch) {
  const auto ended = record(launch->began.stream);
  const std::lock_guard lock(mutex_);
  if (ended) {
    launch->ended = *ended;
    return enqueue(*launch);
  }
  // The stream failed: the kernel may run or not.
  free_events_[launch->began.context].push_back(launch->began.event);
  settle(*launch, {Outcome::LOST, 0.0});
}

size_t DeviceWatch::created_events() {
  const std::lock_guard lock(mutex_);
  return created_events_;
}

Launch* DeviceWatch::new_launch(Group& group, const Mark& began) {
  Launch& launch = launches_.take();
  launch.group = &group;
  launch.began = began;
  launch.ended = Mark{};
  launch.has_begun = false;
  launch.pending_s = began.recorded_s;
  ++group.launches;
  ++group.in_flight;
  group.changed_s = began.recorded_s;
  for (Operation* const operation : group.operations) {
    if (!std::exchange(operation->is_launched, true)) operation->ticket.mark(LAUNCHED);
  }
  return &launch;
}

void DeviceWatch::enqueue(Launch& launch) {
  const Context context = launch.began.context;
  const Stream stream = launch.began.stream;
  const auto place = std::find_if(queues_.begin(), queues_.end(), [&](const auto& queue) {
    return queue->context == context && queue->stream == stream;
  });
  Queue* queue = nullptr;
  if (place != queues_.end()) {
    queue = place->get();
  } else {
    queue = queues_.emplace_back(std::make_unique<Queue>()).get();
    queue->context = context;
    queue->stream = stream;
  }
  (queue->oldest == nullptr ? queue->oldest : queue->newest->next) = &launch;
  queue->newest = &launch;
  ++queued_;
  start_thread();
}

Event DeviceWatch::take_event(const Driver& driver, Context context) {
  {
    const std::lock_guard lock(mutex_);
    auto& events = free_events_[context];
    if (!events.empty()) {
      const Event event = events.back();
      events.pop_back();
      return event;
    }
    ++created_events_;
  }
  return driver.create_event();
}

void DeviceWatch::start_thread() {
  if (!is_running_) {
    is_running_ = true;
    process_ = getpid();
    std::thread([this] { run(); }).detach();
    // Runs before the driver's own handler, which was added earlier.
    std::atexit(stop);
  } else if (is_idle_) {
    wake_.notify_one();
  }
}

void DeviceWatch::run() {
  pthread_setname_np(pthread_self(), "keepstep-watch");
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (!has_work()) {
      is_idle_ = true;
      wake_.wait(lock, [this] { return is_stopping_ || has_work(); });
      is_idle_ = false;
      continue;
    }
    const double oldest_s = poll(lock);
    const double interval_s = now_s() - oldest_s > OLD_S ? OLD_POLL_S : DUE_POLL_S;
    wake_.wait_for(lock, std::chrono::duration<double>(interval_s),
                   [this] { return is_stopping_; });
  }
  has_stopped_ = true;
  stopped_.notify_all();
}

// Ends the thread before the process does; a call that the driver does not return from is not
// waited for.
void DeviceWatch::stop() {
  DeviceWatch& it = get();
  // A forked child has no thread, and perhaps a mutex that nobody will unlock.
  if (it.process_ != getpid()) return;
  std::unique_lock lock(it.mutex_);
  it.is_stopping_ = true;
  it.wake_.notify_all();
  it.stopped_.wait_for(lock, LONGEST_STOP, [&it] { return it.has_stopped_; });
}

// Looks at the oldest launch of each stream; returns when the oldest that is left was launched.
double DeviceWatch::poll(std::unique_lock<std::mutex>& lock) {
  // Other threads append queues meanwhile; only this one removes any.
  for (size_t index = 0; index < queues_.size(); ++index) poll_stream(*queues_[index], lock);
  // A job uses the same few streams again and again.
  if (queues_.size() > KEPT_QUEUES) {
    std::erase_if(queues_, [](const auto& queue) { return queue->oldest == nullptr; });
  }
  close_overdue_groups();
  double oldest_s = now_s();
  for (const auto& queue : queues_) {
    if (queue->oldest != nullptr) oldest_s = std::min(oldest_s, queue->oldest->began.recorded_s);
  }
  return oldest_s;
}

void DeviceWatch::poll_stream(Queue& queue, std::unique_lock<std::mutex>& lock) {
  while (queue.oldest != nullptr && !is_stopping_) {
    Launch& launch = *queue.oldest;
    lock.unlock();
    const Look seen = look(queue, launch);
    lock.lock();
    if (seen.outcome == Outcome::PENDING) return;
    if (seen.outcome == Outcome::BEGUN) {
      launch.has_begun = true;
      launch.pending_s = std::max(launch.ended.recorded_s, seen.at_s);
      for (Operation* const operation : launch.group->operations) {
        if (std::exchange(operation->has_started, true) || operation->is_over) continue;
        operation->ticket.lane->start(operation->ticket.position, seen.at_s);
      }
      continue;
    }
    --queued_;
    queue.oldest = launch.next;
    if (queue.oldest == nullptr) queue.newest = nullptr;
    if (seen.outcome == Outcome::ENDED) {
      auto& events = free_events_[queue.context];
      events.push_back(launch.began.event);
      const Event unused = clocks_[queue.context].offer_anchor(launch.ended.event);
      if (unused != nullptr) events.push_back(unused);
    }
    settle(launch, seen);
  }
}

// Asks the driver about the event of a launch that is due. Without the lock: only this thread looks
// at queued launches.
DeviceWatch::Look DeviceWatch::look(Queue& queue, Launch& launch) {
  const bool has_begun = launch.has_begun;
  const Look seen = look_at(queue, has_begun ? launch.ended : launch.began, launch.pending_s,
                            has_begun ? Outcome::ENDED : Outcome::BEGUN);
  if (seen.outcome == Outcome::PENDING) launch.pending_s = seen.at_s;
  return seen;
}

DeviceWatch::Look DeviceWatch::look_at(Queue& queue, const Mark& mark, double pending_s,
                                       Outcome completed) {
  const Driver* const driver = Driver::get();
  const double asked_s = now_s();
  if (mark.context != context_) {
    if (driver->set_context(mark.context) != Driver::SUCCESS) return {Outcome::LOST, asked_s};
    if (context_ == nullptr) driver->ignore_captures_of_other_threads();
    context_ = mark.context;
  }
  int result = driver->query(mark.event);
  if (result == Driver::NOT_READY) return {Outcome::PENDING, asked_s};
  const double observed_s = now_s();
  double at_s = observed_s;
  if (result == Driver::SUCCESS) {
    at_s = clocks_[mark.context].time_of(*driver, mark.event, pending_s, observed_s, &result);
  }
  if (result != Driver::SUCCESS) {
    // Its anchor may be what the driver does not know any more.
    clocks_.erase(mark.context);
    return {is_lost(result) ? Outcome::LOST : Outcome::FAILED, observed_s};
  }
  queue.last_s = std::max(queue.last_s, at_s);
  return {completed, queue.last_s};
}

void DeviceWatch::close_overdue_groups() {
  const double now = now_s();
  for (size_t index = 0; index < overdue_.size();) {
    Group& group = *overdue_[index];
    const bool is_over = group.state == Group::State::FREE;
    const bool is_late = now - group.changed_s > LATE_LAUNCH_S && group.in_flight == 0;
    if (!is_over && !is_late) {
      ++index;
      continue;
    }
    overdue_[index] = overdue_.back();
    overdue_.pop_back();
    if (!is_over) finish(group);
    group.is_overdue = false;
    groups_.give_back(group);
  }
}

void DeviceWatch::settle(Launch& launch, const Look& seen) {
  Group& group = *launch.group;
  launches_.give_back(launch);
  for (Operation* const operation : group.operations) {
    operation->ended_s = std::max(operation->ended_s, seen.at_s);
    if (seen.outcome == Outcome::LOST) operation->flags |= UNOBSERVED;
    if (seen.outcome == Outcome::FAILED) operation->flags |= FAILED | UNOBSERVED;
  }
  --group.in_flight;
  finish_if_over(group);
}

void DeviceWatch::finish_if_over(Group& group) {
  if (group.state != Group::State::CLOSED || group.in_flight > 0) return;
  const bool are_all_seen = group.is_launched_elsewhere ? group.launches >= group.calls
                                                        : group.launches > 0;
  if (group.is_captured || group.operations.empty() || are_all_seen) finish(group);
}

void DeviceWatch::finish(Group& group) {
  for (Operation* const operation : group.operations) {
    --operation->groups;
    settle(*operation);
  }
  group.operations.clear();
  group.state = Group::State::FREE;
  group.is_captured = group.is_launched_elsewhere = false;
  group.calls = group.launches = group.in_flight = 0;
  if (!group.is_overdue) groups_.give_back(group);
}

void DeviceWatch::settle(Operation& operation) {
  if (!operation.has_returned || operation.groups > 0) return;
  const Ticket& ticket = operation.ticket;
  if (!operation.is_over) {
    const bool is_end_known =
        operation.is_launched && ((operation.flags & UNOBSERVED) == 0 || (operation.flags & FAILED));
    if (is_end_known) {
      ticket.lane->end(ticket.position, operation.flags, operation.ended_s);
    } else {
      ticket.mark(UNOBSERVED);
    }
  }
  operation.ticket.lane = nullptr;
  operations_.give_back(operation);
}

bool DeviceWatch::has_work() const { return queued_ > 0 || !overdue_.empty(); }

}  // namespace keepstep
