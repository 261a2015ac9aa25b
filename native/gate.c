/* Where launches pass. A tenant that nobody is above and that has no compute limit passes at once; others wait for their own
 * earlier work, for their share of time, for the more important, and for their turn, each with a bound. */
#include "gate.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { UNBOUND_NS = 2000000000, ROSTER_NS = 1000000, HERE_NS = 1000000 };
enum waits { FOR_ROOM, FOR_TIME, FOR_HIGHER, FOR_TENANT_TURN, FOR_PROCESS_TURN, NOTHING };

static struct {
    pthread_mutex_t mutex;
    uint64_t looked_ns;
    int below; /* somebody is above us */
} gates[AIM_DEVICES] = {[0 ... AIM_DEVICES - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}};
static __thread int holding = -1; /* the device whose gate this thread is in */
static __thread int cancel_state; /* as it was outside */

/* The default slack of 50 us would be idle time of the device. */
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

/* What the launch must wait for, and until when. */
static enum waits obstacle(const struct aim_driver *driver, int device, struct aim_share *share, struct aim_process *slot,
                           void *stream, uint64_t now, uint64_t *when)
{
    if ((*when = aim_room_at(driver, device, share, stream, now)) > now)
        return FOR_ROOM;
    if ((*when = aim_paid_at(share, now)) > now)
        return FOR_TIME;
    if (!load(&gates[device].below))
        return NOTHING;
    if ((*when = aim_higher_idle_at(share, now)) > now)
        return FOR_HIGHER;
    if ((*when = aim_tenant_turn_at(share, now, aim_inflight_any(device) || aim_process_turn_busy(share, slot, now))) > now)
        return FOR_TENANT_TURN;
    int bound = aim_inflight_any(device) && aim_inflight_is_bound(device, now);
    if ((*when = aim_process_turn_at(share, slot, now, aim_inflight_end(device, share, now, 1), bound)) > now)
        return FOR_PROCESS_TURN;
    return NOTHING;
}

/* Nothing here can hold a launch for ever: not our own work, not a hung neighbour, not a broken region. */
static int at_bound(const struct aim_header *header, enum waits what, uint64_t waited, int device, uint64_t now)
{
    if (what == FOR_TIME)
        return 0; /* bounded by what the share costs */
    uint64_t bound = what == FOR_ROOM ? load(&header->room_ns) : load(&header->starve_ns);
    if (waited < (bound < 10000000000u ? bound : 10000000000u))
        return 0;
    if (what == FOR_ROOM) /* work that waits for this launch, perhaps: stop counting for a while */
        aim_inflight_unbound(device, now + UNBOUND_NS);
    return 1;
}

static void pass(const struct aim_driver *driver, int device, struct aim_share *share, struct aim_process *slot, void *stream)
{
    struct aim_header *header = &share->region->header;
    uint64_t entered = aim_now(), now = entered, when = 0, room_since = entered;
    for (;;) {
        uint32_t seen = load_acquire(&header->wake);
        enum waits what = obstacle(driver, device, share, slot, stream, now, &when);
        if (what == NOTHING)
            break;
        if (what != FOR_ROOM)
            room_since = now;
        if (at_bound(header, what, now - (what == FOR_ROOM ? room_since : entered), device, now)) {
            add(&share->tenant->overruns, 1);
            break;
        }
        if (when > now + 50000000)
            when = now + 50000000;
        if (what == FOR_ROOM) /* what is in flight may take longer than it was reckoned: nobody else's turn yet */
            store(&slot->flight_until_ns, (aim_inflight_busy_until(device) > when ? aim_inflight_busy_until(device) : when) + HERE_NS);
        if (what == FOR_HIGHER && !aim_inflight_any(device) && !aim_process_turn_busy(share, slot, now))
            aim_tenant_turn_defer(share, now);
        else if (what == FOR_HIGHER && when > now + 200000)
            when = now + 200000; /* what is in flight ends soon, and then the turn can go */
        aim_tenant_turn_keep(share, when + 5000000);
        wake_precisely();
        if (what == FOR_HIGHER || what == FOR_TENANT_TURN || what == FOR_PROCESS_TURN)
            wait_for_wake(header, seen, now, when);
        else
            sleep_until(when);
        now = aim_now();
    }
    if (load(&share->tenant->wait_since_ns) != 0)
        store(&share->tenant->wait_since_ns, 0);
    if (load(&slot->crew_wait_ns) != 0)
        store(&slot->crew_wait_ns, 0);
    if (now != entered)
        add(&share->tenant->waited_ns, now - entered);
}

static int gated(int device, struct aim_share *share, uint64_t now)
{
    if (now - load_acquire(&gates[device].looked_ns) > ROSTER_NS) {
        store(&gates[device].below, aim_higher_present(share));
        store_release(&gates[device].looked_ns, now); /* last: who sees it relies on `below` */
    }
    uint32_t ppm = load(&share->tenant->compute_ppm);
    return load(&gates[device].below) || (ppm > 0 && ppm < 1000000);
}

void aim_gate_enter(const struct aim_driver *driver, void *stream)
{
    int device = aim_only_device() >= 0 ? aim_only_device() : INSIDE(driver->device());
    struct aim_share *share = aim_share_of(device);
    holding = -1;
    if (share == NULL || share->broken)
        return;
    struct aim_process *slot = aim_attach(share);
    if (slot == NULL)
        return;
    uint64_t now = aim_now(), graph = 0;
    if (gated(device, share, now) && !INSIDE(driver->capturing(stream, &graph))) {
        aim_depth++;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state); /* waits are cancellation points */
        pthread_mutex_lock(&gates[device].mutex);
        pass(driver, device, share, slot, stream);
        aim_inflight_opened(driver, device, stream);
        aim_depth--;
        holding = device;
        now = aim_now();
    }
    aim_launch_noted(share, slot, now);
}

void aim_gate_leave(const struct aim_driver *driver, void *stream)
{
    (void)stream;
    if (holding < 0)
        return;
    struct aim_share *share = aim_share_of(holding);
    aim_depth++;
    aim_inflight_launched(driver, holding, share);
    aim_depth--;
    uint64_t until = aim_inflight_busy_until(holding), now = aim_now();
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL)
        store(&slot->flight_until_ns, aim_inflight_end(holding, share, now, 0));
    if (until > now && until - now < 1000000000u)
        aim_tenant_turn_keep(share, until + 5000000);
    pthread_mutex_unlock(&gates[holding].mutex);
    pthread_setcancelstate(cancel_state, NULL);
    holding = -1;
}

void aim_gate_after_fork(void)
{
    for (int i = 0; i < AIM_DEVICES; i++) {
        pthread_mutex_init(&gates[i].mutex, NULL);
        gates[i].looked_ns = 0;
        aim_inflight_reset(i);
    }
    holding = -1;
}
