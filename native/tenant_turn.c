/* One turn for all gated tenants of a GPU: at most one of them has work in flight. */
#include "gate.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { GRACE_NS = 5000000, LOOK_NS = 1000000 };

void aim_wake(struct aim_region *region)
{
    __atomic_fetch_add(&region->header.wake, 1, __ATOMIC_SEQ_CST); /* either we see the waiter, or it sees this */
    if (__atomic_load_n(&region->header.waiters, __ATOMIC_SEQ_CST) != 0)
        syscall(SYS_futex, &region->header.wake, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

/* The next tenant: the highest rank, then the longest wait. Its mark is removed, so that a dead one is chosen only once. */
static uint32_t next_waiter(struct aim_share *share, int *higher)
{
    uint32_t best = AIM_TENANTS, mine = load(&share->tenant->rank);
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        uint64_t since = load(&tenant->wait_since_ns);
        if (i == share->index || since == 0 || load(&tenant->state) != AIM_ACTIVE)
            continue;
        const struct aim_tenant *other = best == AIM_TENANTS ? NULL : &share->region->tenants[best];
        if (other == NULL || load(&tenant->rank) > load(&other->rank) ||
            (load(&tenant->rank) == load(&other->rank) && since < load(&other->wait_since_ns)))
            best = i;
    }
    *higher = best != AIM_TENANTS && load(&share->region->tenants[best].rank) > mine;
    return best;
}

void aim_tenant_turn_keep(struct aim_share *share, uint64_t until)
{
    struct aim_header *header = &share->region->header;
    if (load(&header->turn) == share->index + 1)
        store(&header->turn_until_ns, until);
}

static void hand_over(struct aim_share *share, uint32_t next, uint64_t now)
{
    struct aim_header *header = &share->region->header;
    store(&share->region->tenants[next].wait_since_ns, 0);
    store(&header->turn_until_ns, now + GRACE_NS);
    store(&header->turn_since_ns, now);
    store_release(&header->turn, next + 1);
    aim_wake(share->region);
}

static uint64_t wait_for(struct aim_share *share, uint64_t now)
{
    if (load(&share->tenant->wait_since_ns) == 0) {
        store(&share->tenant->wait_since_ns, now);
        aim_wake(share->region); /* the holder may itself be waiting, for us */
    }
    uint64_t until = load(&share->region->header.turn_until_ns);
    return until > now && until < now + LOOK_NS ? until : now + LOOK_NS;
}

/* A holder that must wait for a higher tenant hands the turn over, if that tenant waits for it. */
void aim_tenant_turn_defer(struct aim_share *share, uint64_t now)
{
    int higher = 0;
    if (load_acquire(&share->region->header.turn) != share->index + 1)
        return;
    uint32_t next = next_waiter(share, &higher);
    if (higher)
        hand_over(share, next, now);
}

uint64_t aim_tenant_turn_at(struct aim_share *share, uint64_t now, int in_flight)
{
    struct aim_header *header = &share->region->header;
    uint64_t mine = share->index + 1, holder = load_acquire(&header->turn);
    if (holder == mine) {
        int higher = 0;
        uint32_t next = next_waiter(share, &higher);
        uint64_t since = load(&header->turn_since_ns);
        int over = now > since && now - since > load(&header->quantum_ns);
        if (next == AIM_TENANTS || !(over || higher)) {
            store(&header->turn_until_ns, now + GRACE_NS);
            return now;
        }
        if (in_flight)
            return now + 50000; /* the next tenant starts on an idle device */
        hand_over(share, next, now);
        return wait_for(share, now);
    }
    uint64_t until = load(&header->turn_until_ns);
    if (holder != 0 && until > now && until - now < 60000000000u) /* a time far ahead is a damaged region */
        return wait_for(share, now);
    if (!__atomic_compare_exchange_n(&header->turn, &holder, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return wait_for(share, now);
    store(&header->turn_until_ns, now + GRACE_NS);
    store(&header->turn_since_ns, now);
    store(&share->tenant->wait_since_ns, 0);
    return now;
}
