/* One bound for all processes of a gated tenant: one of them at a time has work in flight.
 *
 * Each tells in its own slot when its work ends, as it reckons; whoever comes after that takes over at once. While it goes on
 * launching it keeps the place for a quantum, then gives it to who waited longest. Nothing of a process that was killed has to
 * be given back: what it told lies in the past soon. */
#include "gate.h"

enum { LOOK_NS = 1000000, SOON_NS = 50000, FAR_NS = 1000000000 };

/* When what the others have in flight ends; not later than `now`: they have nothing. A date far ahead is a broken region. */
static uint64_t others_end(const struct aim_tenant *tenant, const struct aim_process *slot, uint64_t now)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        uint64_t until = __atomic_load_n(&process->flight_until_ns, __ATOMIC_SEQ_CST);
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
        uint64_t since = load(&process->crew_wait_ns);
        if (process != slot && since != 0 && load(&process->state) == AIM_ACTIVE &&
            (best == NULL || since < load(&best->crew_wait_ns)))
            best = process;
    }
    return best;
}

static uint64_t wait_until(struct aim_process *slot, uint64_t now, uint64_t when)
{
    if (load(&slot->crew_wait_ns) == 0)
        store(&slot->crew_wait_ns, now);
    return when > now + LOOK_NS ? now + LOOK_NS : when;
}

/* Its mark is taken off: a dead one is asked only once. */
static void hand_over(struct aim_share *share, struct aim_process *slot, struct aim_process *next, uint64_t now)
{
    store(&slot->flight_until_ns, 0);
    store(&next->crew_wait_ns, 0);
    store(&share->tenant->crew_since_ns, now);
    store_release(&share->tenant->crew, (uint64_t)(next - share->tenant->processes) + 1);
    aim_wake(share->region);
}

/* Told before it is taken, looked again after: of two that take it at once, at least one sees the other and gives way. */
static int take(struct aim_tenant *tenant, struct aim_process *slot, uint64_t holder, uint64_t mine, uint64_t until,
                uint64_t now)
{
    uint64_t before = __atomic_exchange_n(&slot->flight_until_ns, until, __ATOMIC_SEQ_CST), taken = holder, given = mine;
    if (holder == mine) {
        if (__atomic_load_n(&tenant->crew, __ATOMIC_SEQ_CST) == mine)
            return 1;
    } else if (__atomic_compare_exchange_n(&tenant->crew, &taken, mine, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        if (others_end(tenant, slot, now) <= now) {
            store(&tenant->crew_since_ns, now);
            return 1;
        }
        __atomic_compare_exchange_n(&tenant->crew, &given, holder, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    store(&slot->flight_until_ns, before);
    return 0;
}

uint64_t aim_process_turn_at(struct aim_share *share, struct aim_process *slot, uint64_t now, uint64_t until, int in_flight)
{
    struct aim_tenant *tenant = share->tenant;
    if (aim_processes(tenant) < 2)
        return now;
    uint64_t mine = (uint64_t)(slot - tenant->processes) + 1, holder = __atomic_load_n(&tenant->crew, __ATOMIC_SEQ_CST);
    if (holder == mine) {
        uint64_t since = load(&tenant->crew_since_ns);
        struct aim_process *next = longest_waiter(tenant, slot);
        if (next != NULL && now > since && now - since > load(&share->region->header.quantum_ns)) {
            if (in_flight)
                return now + SOON_NS; /* the next one starts on an empty device */
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
