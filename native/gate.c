/* Where launches pass. A tenant without a higher one on its GPU and without a compute limit passes at once. Others wait for
 * earlier work of their own, for their share of time, for higher tenants and for their turn, each with a bound. No lock is held
 * while a launch waits, nor while the driver executes it. */
#include "gate.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROSTER_NS = 1000000, HERE_NS = 5000000, ASK_NS = 10000000, GRACE_NS = 5000000, LONGEST_WAIT_NS = 50000000 };
enum waits { NOTHING, FOR_ROOM, FOR_TIME, FOR_HIGHER, FOR_PAUSE, FOR_TENANT_TURN, FOR_PROCESS_TURN };

static struct {
    uint64_t looked_ns;
    int below; /* a higher tenant is present */
} gates[AIM_DEVICES];
static __thread struct aim_launch current; /* of this thread, between enter and leave */
static __thread int inside, cancel_state;
static int captures; /* under way in this process */

/* The default timer slack of 50 us would be idle time of the device. */
static void wake_precisely(void)
{
    static __thread int precise;
    if (!precise)
        prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    precise = 1;
}

static void sleep_until(uint64_t when)
{
    struct timespec t = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void wait_for_wake(struct aim_header *header, uint32_t seen, uint64_t now, uint64_t when)
{
    uint64_t left = when - now;
    struct timespec t = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
    __atomic_fetch_add(&header->waiters, 1, __ATOMIC_SEQ_CST); /* see aim_wake */
    syscall(SYS_futex, &header->wake, FUTEX_WAIT, seen, &t, NULL, 0);
    __atomic_fetch_sub(&header->waiters, 1, __ATOMIC_RELAXED);
}

static uint64_t pause_at(const struct aim_launch *launch, uint64_t now)
{
    uint64_t when = aim_lookahead_at(launch->share, launch->expected_ns, now);
    for (int i = 0; when <= now && aim_window_is_shared() && i < aim_share_count(); i++)
        if (!aim_share_at(i)->broken)
            when = aim_lookahead_at(aim_share_at(i), launch->expected_ns, now);
    return when;
}

/* Whether it may be queued behind earlier work of its tenant, so that the device is not idle between the two. A tenant that yields
 * a share allows for that. While the higher ones are idle, only a little is queued, which their next launch would have to wait for;
 * and behind a strict one only after a long silence, so that it is at most the first of its requests. */
static int may_queue(struct aim_launch *launch, uint64_t now)
{
    launch->queues = 0;
    if (aim_yield_bounds_room(launch->share))
        return 0;
    if (launch->yielded)
        return 1;
    int alone = load(&gates[launch->device].below) && !aim_window_is_shared() && aim_higher_allow_queue(launch->share, now);
    if (!alone || !aim_inflight_is_short(launch, now))
        return 0;
    launch->queues = aim_higher_all_yield(launch->share);
    return 1;
}

/* What the launch must wait for, and until when; `alone`: it has waited for others long enough. */
static enum waits obstacle(struct aim_launch *launch, int alone, uint64_t now, uint64_t *when)
{
    struct aim_share *share = launch->share;
    int device = launch->device;
    aim_inflight_expect(launch);
    launch->yielded = load(&gates[device].below) && !aim_window_is_shared() && aim_yields_now(share, now);
    int queued = may_queue(launch, now);
    if ((*when = aim_room_at(launch, now)) > now && !(queued && (launch->yielded || aim_inflight_has_slot(device))))
        return FOR_ROOM;
    launch->follows = aim_window_is_shared() && aim_window_must_follow(launch, now);
    if (launch->follows)
        return NOTHING;
    if ((*when = aim_compute_at(share, now)) > now)
        return FOR_TIME;
    if (alone)
        return NOTHING;
    int busy = aim_inflight_any(device);
    if (load(&gates[device].below)) {
        if ((*when = aim_window_is_shared() ? aim_window_at(launch, now) : aim_higher_idle_at(share, launch, now)) > now)
            return FOR_HIGHER;
        if ((*when = pause_at(launch, now)) > now)
            return FOR_PAUSE;
        if ((*when = aim_tenant_turn_at(share, now, busy || aim_process_turn_busy(share, launch->slot, now))) > now)
            return FOR_TENANT_TURN;
    }
    if ((*when = aim_process_turn_at(share, launch->slot, now, aim_inflight_end(launch, now, 1), busy)) > now)
        return FOR_PROCESS_TURN;
    return NOTHING;
}

static int is_for_others(enum waits what) { return what != NOTHING && what != FOR_ROOM && what != FOR_TIME; }

static uint64_t bound_of(const struct aim_launch *launch, enum waits what)
{
    uint64_t most = 60000000000u, starve = load(&launch->share->region->header.starve_ns);
    if (what != FOR_HIGHER && what != FOR_PAUSE)
        return starve < 10000000000u ? starve : 10000000000u;
    uint64_t bound = launch->known ? aim_lookahead_bound(launch->share, launch->expected_ns) : starve;
    if (bound == starve && bound > 10000000000u)
        bound = 10000000000u; /* a damaged region */
    return bound < most ? bound : most;
}

/* One launch of the tenant passes at a bound, however many threads and processes wait for one. */
static int take_overrun(struct aim_tenant *tenant, uint64_t bound, uint64_t now)
{
    uint64_t last = load(&tenant->overrun_ns);
    return (last > now || now - last >= bound) &&
           __atomic_compare_exchange_n(&tenant->overrun_ns, &last, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static void rest(struct aim_launch *launch, enum waits what, uint32_t seen, uint64_t now, uint64_t when)
{
    struct aim_share *share = launch->share;
    if (when > now + LONGEST_WAIT_NS)
        when = now + LONGEST_WAIT_NS;
    if (what == FOR_HIGHER && !aim_inflight_seen(launch->device) && !aim_process_turn_busy(share, launch->slot, now))
        aim_tenant_turn_defer(share, now);
    else if (what == FOR_HIGHER && when > now + 200000)
        when = now + 200000; /* what is in flight ends soon, and then the turn can be handed over */
    if (what != FOR_PAUSE) /* short launches of other tenants may use the time */
        aim_tenant_turn_keep(share, when + GRACE_NS);
    wake_precisely();
    if (is_for_others(what))
        wait_for_wake(&share->region->header, seen, now, when);
    else
        sleep_until(when);
}

/* One look at the gate; with NOTHING the launch is counted in. */
static enum waits try_to_pass(struct aim_launch *launch, int alone, uint64_t room_since, uint64_t now, uint64_t *when)
{
    aim_inflight_lock(launch->device);
    enum waits what = obstacle(launch, alone, now, when);
    if (what == FOR_ROOM && aim_inflight_stalled(launch, room_since, now)) {
        add(&launch->share->tenant->overruns, 1);
        launch->forced = 1;
        aim_inflight_join(launch, now);
        what = NOTHING;
    } else if (what == FOR_ROOM) { /* what is in flight may take longer than expected: not yet another process's turn */
        uint64_t end = aim_inflight_end(launch, now, 0);
        store(&launch->slot->inflight_until_ns, (end > *when ? end : *when) + HERE_NS);
    } else if (what == NOTHING && !launch->follows && !aim_compute_pay(launch->share, launch->expected_ns, now)) {
        *when = now + 100000;
        what = FOR_TIME;
    } else if (what == NOTHING) {
        aim_inflight_join(launch, now);
        if (launch->yielded)
            aim_yield_admitted(launch, now);
    }
    aim_inflight_unlock(launch->device);
    return what;
}

/* Returns the time at which it passed. */
static uint64_t pass(struct aim_launch *launch, uint64_t entered)
{
    struct aim_tenant *tenant = launch->share->tenant;
    uint64_t now = entered, when = 0, room_since = entered, held_since = 0;
    int alone = 0;
    launch->entered_ns = entered;
    for (;;) {
        uint32_t seen = load_acquire(&launch->share->region->header.wake);
        enum waits what = try_to_pass(launch, alone, room_since, now, &when);
        if (what == NOTHING)
            break;
        if (what != FOR_ROOM)
            room_since = now;
        if (what == FOR_PAUSE && held_since == 0) {
            held_since = now;
            add(&tenant->held, 1);
        }
        if (is_for_others(what) && now - entered >= bound_of(launch, what) && take_overrun(tenant, bound_of(launch, what), now)) {
            add(&tenant->overruns, 1);
            alone = launch->forced = 1;
            continue;
        }
        rest(launch, what, seen, now, when);
        now = aim_now();
    }
    if (load(&tenant->wait_since_ns) != 0)
        store(&tenant->wait_since_ns, 0);
    if (load(&launch->slot->turn_wait_ns) != 0)
        store(&launch->slot->turn_wait_ns, 0);
    if (held_since != 0)
        add(&tenant->held_ns, now - held_since);
    if (now != entered)
        add(&tenant->waited_ns, now - entered);
    return now;
}

/* Once per millisecond: whether this tenant is gated, and whether the slot is still ours. */
static int look(int device, struct aim_share *share, uint64_t now)
{
    if (now - load_acquire(&gates[device].looked_ns) <= ROSTER_NS)
        return 1;
    if (load_acquire(&share->slot) != NULL ? !aim_slot_is_ours(share) : !aim_tenant_is_ours(share))
        return 0;
    int below = aim_higher_present(share);
    for (int i = 0; !below && aim_window_is_shared() && i < aim_share_count(); i++)
        below = !aim_share_at(i)->broken && aim_higher_present(aim_share_at(i));
    store(&gates[device].below, below);
    store_release(&gates[device].looked_ns, now); /* last: a thread that sees it relies on `below` */
    return 1;
}

/* A driver is asked whether a stream is captured only while a capture is under way. A capture that failed may be counted for
 * ever: then it is asked more often than it has to be. */
void aim_capture_begins(void) { add(&captures, 1); }
void aim_capture_ends(void)
{
    int count = load(&captures);
    while (count > 0 && !__atomic_compare_exchange_n(&captures, &count, count - 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static void note(const struct aim_launch *launch, uint64_t now)
{
    struct aim_process *slot = launch->slot;
    uint64_t graph = 0;
    if (load(&captures) != 0 && INSIDE(launch->driver->capturing(launch->stream, &graph))) {
        store(&slot->asked_ns, now); /* a sign of life; nothing runs, and nothing will be waited for */
        return;
    }
    aim_pause_noted(launch->share, slot, now);
    store(&slot->launch_ns, now);
    if (load(&launch->share->tenant->rank) == 0 && !aim_window_is_shared())
        add(&slot->launched, 1); /* no tenant is gated by the lowest rank */
    else
        aim_stream_launched(launch->driver, launch->device, launch->stream, slot);
    if (aim_window_is_shared())
        aim_window_launched(launch);
}

/* A process that finds no place in the region is gated too. It cannot say what it has in flight; a place is asked for now and
 * then. */
static struct aim_process *slot_or_none(struct aim_share *share, int device, uint64_t now)
{
    static struct aim_process outside[AIM_DEVICES];
    static uint64_t asked_ns[AIM_DEVICES];
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot == NULL && now - load(&asked_ns[device]) > ASK_NS) {
        slot = aim_attach(share);
        store(&asked_ns[device], slot == NULL ? now : 0);
    }
    return slot != NULL ? slot : &outside[device];
}

void aim_gate_enter(const struct aim_driver *driver, void *stream, struct aim_key key)
{
    int device = aim_current_device(driver);
    struct aim_share *share = aim_share_of(device);
    inside = 0;
    if (share == NULL || share->broken || device < 0 || device >= AIM_DEVICES)
        return;
    uint64_t now = aim_now(), graph = 0;
    struct aim_process *slot = slot_or_none(share, device, now);
    if (!look(device, share, now)) { /* the tenant was removed, or the slot was reaped */
        if (aim_attach(share) == NULL)
            return;
        slot = slot_or_none(share, device, now);
    }
    current = (struct aim_launch){.driver = driver, .share = share, .slot = slot, .stream = stream, .key = key, .device = device};
    if ((load(&gates[device].below) || aim_compute_is_limited(share)) && !INSIDE(driver->capturing(stream, &graph))) {
        aim_depth++;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state); /* waits are cancellation points */
        now = pass(&current, now);
        aim_depth--;
        inside = 1;
    }
    note(&current, now);
}

void aim_gate_leave(void)
{
    if (!inside)
        return;
    int device = current.device;
    aim_depth++;
    aim_inflight_lock(device);
    uint64_t now = aim_inflight_launched(&current), end = aim_inflight_end(&current, now, 0);
    aim_inflight_unlock(device);
    aim_depth--;
    store(&current.slot->inflight_until_ns, end);
    if (end > now && end - now < 60000000000u)
        aim_tenant_turn_keep(current.share, end + GRACE_NS);
    pthread_setcancelstate(cancel_state, NULL);
    inside = 0;
}

void aim_gate_after_fork(void)
{
    memset(gates, 0, sizeof gates);
    for (int i = 0; i < AIM_DEVICES; i++)
        aim_inflight_reset(i);
    aim_streams_after_fork();
    aim_lengths_after_fork();
    captures = 0;
    inside = 0;
}
