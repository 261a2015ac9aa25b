/* One bound for all processes of a gated tenant: one of them at a time has work in flight.
 *
 * Each process publishes the expected end of its work in its slot; after that time another one can take the turn at once. While
 * it continues to launch it keeps the turn for a quantum, then hands it to the process that has waited longest. A killed process
 * leaves nothing to release: its published end soon lies in the past. */
#include "gate.h"

enum { LOOK_NS = 1000000, SOON_NS = 50000, GRACE_NS = 2000000 };
#define FAR_NS 60000000000u

/* When the work of the other processes ends; not later than `now`: they have none. A time far ahead is a damaged region. */
static uint64_t others_end(const struct aim_tenant *tenant, const struct aim_process *slot, uint64_t now)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        uint64_t until = __atomic_load_n(&process->inflight_until_ns, __ATOMIC_SEQ_CST);
        if (process != slot && load(&process->state) == AIM_ACTIVE && until > end && until < now + FAR_NS)
            end = until;
    }
    return end;
}

int aim_process_turn_busy(const struct aim_share *share, const struct aim_process *slot, uint64_t now)
{
    return aim_processes(share->tenant) > 1 && others_end(share->tenant, slot, now) > now;
}

static struct aim_process *longest_waiter(struct aim_tenant *tenant, const struct aim_process *slot)
{
    struct aim_process *best = NULL;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        struct aim_process *process = &tenant->processes[i];
        uint64_t since = load(&process->turn_wait_ns);
        if (process != slot && since != 0 && load(&process->state) == AIM_ACTIVE &&
            (best == NULL || since < load(&best->turn_wait_ns)))
            best = process;
    }
    return best;
}

static uint64_t wait_until(struct aim_process *slot, uint64_t now, uint64_t when)
{
    if (load(&slot->turn_wait_ns) == 0)
        store(&slot->turn_wait_ns, now);
    return when > now + LOOK_NS ? now + LOOK_NS : when;
}

/* Its mark is removed, so that a dead process is chosen only once; the others leave it time to wake up. */
static void hand_over(struct aim_share *share, struct aim_process *slot, struct aim_process *next, uint64_t now)
{
    store(&slot->inflight_until_ns, 0);
    store(&next->turn_wait_ns, 0);
    store(&next->inflight_until_ns, now + GRACE_NS);
    store(&share->tenant->process_turn_since_ns, now);
    store_release(&share->tenant->process_turn, (uint64_t)(next - share->tenant->processes) + 1);
    aim_wake(share->region);
}

/* Published before the turn is taken and checked again after: of two that take it at once, at least one sees the other. */
static int take(struct aim_tenant *tenant, struct aim_process *slot, uint64_t holder, uint64_t mine, uint64_t until,
                uint64_t now)
{
    uint64_t before = __atomic_exchange_n(&slot->inflight_until_ns, until, __ATOMIC_SEQ_CST), taken = holder, given = mine;
    if (holder == mine) {
        if (__atomic_load_n(&tenant->process_turn, __ATOMIC_SEQ_CST) == mine)
            return 1;
    } else if (__atomic_compare_exchange_n(&tenant->process_turn, &taken, mine, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        if (others_end(tenant, slot, now) <= now) {
            store(&tenant->process_turn_since_ns, now);
            return 1;
        }
        __atomic_compare_exchange_n(&tenant->process_turn, &given, holder, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    store(&slot->inflight_until_ns, before);
    return 0;
}

uint64_t aim_process_turn_at(struct aim_share *share, struct aim_process *slot, uint64_t now, uint64_t until, int in_flight)
{
    struct aim_tenant *tenant = share->tenant;
    if (slot < tenant->processes || slot >= tenant->processes + AIM_PROCESSES) { /* without a place, it cannot take the turn */
        uint64_t end = others_end(tenant, slot, now);
        return end <= now + LOOK_NS ? end > now ? end : now : now + LOOK_NS;
    }
    if (aim_processes(tenant) < 2)
        return now;
    uint64_t mine = (uint64_t)(slot - tenant->processes) + 1, holder = __atomic_load_n(&tenant->process_turn, __ATOMIC_SEQ_CST);
    if (holder == mine) {
        uint64_t since = load(&tenant->process_turn_since_ns);
        struct aim_process *next = longest_waiter(tenant, slot);
        if (next != NULL && now > since && now - since > load(&share->region->header.quantum_ns)) {
            if (in_flight)
                return now + SOON_NS; /* the next process starts on an idle device */
            hand_over(share, slot, next, now);
            return wait_until(slot, now, now + LOOK_NS);
        }
    } else {
        uint64_t end = others_end(tenant, slot, now);
        if (end > now)
            return wait_until(slot, now, end);
    }
    return take(tenant, slot, holder, mine, until, now) ? now : wait_until(slot, now, now + SOON_NS);
}
