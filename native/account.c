/* Slots, charges and caps. A process adds what it wants to its own slot, sums the slots of its tenant, and takes it back where
 * the sum exceeds the cap: so the cap holds without any lock. The tenant's lock only keeps two processes from refusing each
 * other at once, and protects the release of slots of dead processes; where its holder does not run, it is not waited for. */
#include "aim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LOCK_NS = 500000000, LOCK_FREE_NS = 1000000000, BESIDE_GRAIN = 16 << 20 };

static int is_held(const struct aim_process *slot)
{
    return slot != NULL && load(&slot->state) == AIM_ACTIVE && aim_is_own_process(slot);
}

static int owns(const struct aim_share *share)
{
    const struct aim_tenant *tenant = share->tenant;
    return load(&tenant->state) == AIM_ACTIVE && load(&tenant->epoch) == share->epoch;
}

static void let_go(struct aim_share *share)
{
    int cancel = share->cancel;
    pthread_mutex_unlock(&share->mutex);
    pthread_setcancelstate(cancel, NULL);
}

static int try_lock(const struct aim_share *share, short type)
{
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)share->index, .l_len = 1};
    int code;
    while ((code = fcntl(share->descriptor, F_OFD_SETLK, &range)) != 0 && errno == EINTR)
        ;
    return code == 0;
}

/* Waits for a lock whose holder runs. A stopped holder (SIGSTOP, docker pause, a debugger) is not waited for again for a while. */
static int take_lock(struct aim_share *share)
{
    uint64_t now = aim_now(), until = now + (share->lock_free_until_ns > now ? 0 : LOCK_NS);
    for (long pause = 20000; !try_lock(share, F_WRLCK); pause = pause < 1000000 ? pause * 2 : pause) {
        if (errno != EAGAIN && errno != EACCES)
            return 0;
        if (aim_now() >= until) {
            static int said;
            aim_say_once(&said, "%s: the holder of tenant %u's lock does not run; allocations go on without the lock",
                         share->path, share->index);
            share->lock_free_until_ns = aim_now() + LOCK_FREE_NS;
            return 0;
        }
        struct timespec rest = {.tv_nsec = pause};
        nanosleep(&rest, NULL);
    }
    share->lock_free_until_ns = 0;
    return 1;
}

enum lock { NO_FILE, ALONE, LOCKED }; /* ALONE: only among the threads of this process */

static enum lock lock(struct aim_share *share)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a cancelled thread would keep the mutex */
    pthread_mutex_lock(&share->mutex);
    share->cancel = cancel;
    if (!aim_reopen(share)) {
        let_go(share);
        return NO_FILE;
    }
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL && !share->life)
        share->life = aim_life_hold(share, slot); /* the descriptor was closed by the program, and the lock with it */
    return take_lock(share) ? LOCKED : ALONE;
}

static void unlock(struct aim_share *share, enum lock how)
{
    if (how == LOCKED)
        try_lock(share, F_UNLCK);
    let_go(share);
}

static uint64_t plus(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

static uint64_t total(const struct aim_tenant *tenant)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        if (__atomic_load_n(&process->state, __ATOMIC_SEQ_CST) != AIM_ACTIVE)
            continue;
        sum = plus(sum, plus(__atomic_load_n(&process->used_bytes, __ATOMIC_SEQ_CST), load(&process->context_bytes)));
    }
    return sum;
}

static void take_away(uint64_t *counter, uint64_t bytes)
{
    uint64_t old = load(counter);
    while (!__atomic_compare_exchange_n(counter, &old, old > bytes ? old - bytes : 0, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
}

/* Releases what dead processes held; only with the tenant's lock. */
static void reap(const struct aim_share *share, enum lock how)
{
    struct aim_tenant *tenant = share->tenant;
    for (uint32_t i = 0; how == LOCKED && i < aim_processes(tenant); i++) {
        struct aim_process *process = &tenant->processes[i];
        if (load(&process->state) == AIM_ACTIVE && process != share->slot && !aim_is_alive(share, process))
            store_release(&process->state, AIM_FREE);
    }
}

static struct aim_process *claim_slot(struct aim_tenant *tenant)
{
    for (uint32_t i = 0; i < AIM_PROCESSES; i++) {
        uint32_t free = load(&tenant->processes[i].state);
        if (free == AIM_ACTIVE || free == AIM_CLAIMED ||
            !__atomic_compare_exchange_n(&tenant->processes[i].state, &free, AIM_CLAIMED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        for (uint32_t high = load(&tenant->process_high);
             high <= i && !__atomic_compare_exchange_n(&tenant->process_high, &high, i + 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);)
            ;
        return &tenant->processes[i];
    }
    return NULL;
}

/* What this process was before it called exec had a slot; what it held is gone. */
void aim_forget_former_self(struct aim_share *share)
{
    for (uint32_t i = 0; i < aim_processes(share->tenant); i++) {
        struct aim_process *process = &share->tenant->processes[i];
        if (load(&process->state) == AIM_ACTIVE && aim_is_own_process(process))
            store_release(&process->state, AIM_FREE);
    }
}

static struct aim_process *attach_locked(struct aim_share *share, enum lock how)
{
    struct aim_tenant *tenant = share->tenant;
    aim_forget_former_self(share);
    struct aim_process *slot = claim_slot(tenant);
    if (slot == NULL) {
        reap(share, how);
        slot = claim_slot(tenant);
    }
    if (slot == NULL)
        return NULL;
    memset((char *)slot + sizeof slot->state, 0, sizeof *slot - sizeof slot->state);
    aim_life_describe(slot);
    share->life = aim_life_hold(share, slot);
    store(&slot->used_bytes, load(&share->held));
    store(&slot->context_bytes, load(&tenant->context_bytes));
    store(&slot->attached_ns, aim_now());
    __atomic_store_n(&slot->state, AIM_ACTIVE, __ATOMIC_SEQ_CST);
    return slot;
}

struct aim_process *aim_attach(struct aim_share *share)
{
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL)
        return slot;
    enum lock how = share->tenant == NULL ? NO_FILE : lock(share);
    if (how == NO_FILE)
        return NULL;
    slot = share->slot;
    if (slot == NULL && owns(share))
        slot = attach_locked(share, how);
    store_release(&share->slot, slot);
    unlock(share, how);
    return slot;
}

int aim_slot_is_ours(struct aim_share *share)
{
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot == NULL || (owns(share) && is_held(slot)))
        return slot != NULL;
    __atomic_compare_exchange_n(&share->slot, &slot, NULL, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    return 0;
}

/* 1: the answer is `*allowed`; 0: the accounting decides. */
static int decided(struct aim_share *share, int *allowed)
{
    static int said;
    if (share == NULL) {
        *allowed = 1;
        return 1;
    }
    if (!share->broken && owns(share))
        return 0;
    aim_say_once(&said, "%s %s: device allocations are %s", share->path == NULL ? "a device" : share->path,
                 share->path == NULL ? "was not granted" : share->broken ? share->wrong : "no longer grants anything to us",
                 aim_fail_closed ? "refused (fail closed)" : "NOT limited (fail open)");
    *allowed = !aim_fail_closed;
    return 1;
}

/* Adds to this process's slot, and takes it back where the tenant's sum exceeds the cap. */
static int add_within_cap(struct aim_share *share, uint64_t bytes, uint64_t *sum)
{
    struct aim_tenant *tenant = share->tenant;
    uint64_t used = __atomic_load_n(&share->slot->used_bytes, __ATOMIC_SEQ_CST);
    *sum = total(tenant);
    if (bytes > UINT64_MAX / 4 || used > UINT64_MAX / 4 || plus(*sum, bytes) > load(&tenant->cap_bytes))
        return 0; /* would not fit now; the sum with it must not be shown to others */
    __atomic_fetch_add(&share->slot->used_bytes, bytes, __ATOMIC_SEQ_CST);
    *sum = total(tenant);
    if (*sum <= __atomic_load_n(&tenant->cap_bytes, __ATOMIC_SEQ_CST))
        return 1;
    take_away(&share->slot->used_bytes, bytes);
    return 0;
}

static void note_sum(struct aim_tenant *tenant, uint64_t sum)
{
    store(&tenant->used_bytes, sum);
    for (uint64_t peak = load(&tenant->peak_bytes); sum > peak;)
        if (__atomic_compare_exchange_n(&tenant->peak_bytes, &peak, sum, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* Far from the cap, without the lock: no other process is refused because of what is taken back at once. 0: not decided. */
int aim_reserve_far(int device, uint64_t bytes)
{
    struct aim_share *share = aim_share_of(device);
    struct aim_process *slot = share == NULL || share->broken ? NULL : load_acquire(&share->slot);
    if (slot == NULL || !owns(share) || !is_held(slot))
        return 0;
    const struct aim_tenant *tenant = share->tenant;
    uint64_t cap = load(&tenant->cap_bytes), sum = total(tenant);
    if (bytes > UINT64_MAX / 4 || plus(sum, bytes) > cap - cap / 8)
        return 0;
    add(&share->held, bytes); /* first: a slot that is attached meanwhile begins with it */
    __atomic_fetch_add(&slot->used_bytes, bytes, __ATOMIC_SEQ_CST);
    sum = total(tenant);
    if (sum <= __atomic_load_n(&tenant->cap_bytes, __ATOMIC_SEQ_CST) && load_acquire(&share->slot) == slot &&
        load(&slot->state) == AIM_ACTIVE) {
        note_sum(share->tenant, sum);
        return 1;
    }
    take_away(&slot->used_bytes, bytes);
    take_away(&share->held, bytes);
    return 0;
}

int aim_reserve(int device, uint64_t bytes)
{
    static int said;
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (decided(share, &allowed))
        return allowed;
    struct aim_tenant *tenant = share->tenant;
    enum lock how = lock(share);
    if (how == NO_FILE) {
        aim_say_once(&said, "%s cannot be locked: allocations are %s", share->path,
                     aim_fail_closed ? "refused (fail closed)" : "NOT limited (fail open)");
        return !aim_fail_closed;
    }
    if (!is_held(share->slot))
        store_release(&share->slot, attach_locked(share, how));
    uint64_t sum = 0;
    if (share->slot != NULL) {
        allowed = add_within_cap(share, bytes, &sum);
        if (!allowed) {
            reap(share, how);
            allowed = add_within_cap(share, bytes, &sum);
        }
    }
    if (allowed) {
        add(&share->held, bytes);
        note_sum(tenant, sum);
    } else {
        add(&tenant->denied, 1);
    }
    unlock(share, how);
    return allowed;
}

/* A process is charged for its first context before it has one. */
int aim_admit_context(int device)
{
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (decided(share, &allowed))
        return allowed;
    enum lock how = lock(share);
    if (how == NO_FILE)
        return !aim_fail_closed;
    struct aim_tenant *tenant = share->tenant;
    allowed = is_held(share->slot);
    if (!allowed) {
        uint64_t context = load(&tenant->context_bytes), cap = load(&tenant->cap_bytes);
        aim_forget_former_self(share);
        if (plus(total(tenant), context) > cap)
            reap(share, how);
        struct aim_process *slot = NULL;
        if (context == 0 || plus(total(tenant), context) <= cap)
            slot = attach_locked(share, how);
        if (slot != NULL && context != 0 && total(tenant) > load(&tenant->cap_bytes)) { /* another process was faster */
            store_release(&slot->state, AIM_FREE);
            slot = NULL;
        }
        store_release(&share->slot, slot);
        allowed = slot != NULL; /* without a slot its context would not be charged */
        if (!allowed)
            add(&tenant->denied, 1);
    }
    unlock(share, how);
    return allowed;
}

/* What the driver holds for this process beside what is counted, as measured: with some room, since it grows in small steps. */
void aim_charge_beside(struct aim_share *share, uint64_t bytes, int exact)
{
    enum lock how = share->tenant == NULL ? NO_FILE : lock(share);
    if (how == NO_FILE)
        return;
    struct aim_process *slot = share->slot;
    if (owns(share) && is_held(slot)) {
        uint64_t least = load(&share->tenant->context_bytes), want = least;
        if (bytes > least)
            want = (bytes + BESIDE_GRAIN - 1) / BESIDE_GRAIN * BESIDE_GRAIN;
        if (exact || want > load(&slot->context_bytes))
            store(&slot->context_bytes, want);
        store(&slot->measured_ns, aim_now());
        store(&share->tenant->used_bytes, total(share->tenant));
    }
    unlock(share, how);
}

void aim_give_back(int device, uint64_t bytes)
{
    struct aim_share *share = aim_share_of(device);
    if (share == NULL || share->broken || bytes == 0)
        return;
    take_away(&share->held, bytes);
    struct aim_process *slot = load_acquire(&share->slot);
    if (!is_held(slot))
        return;
    take_away(&slot->used_bytes, bytes);
    store(&share->tenant->used_bytes, total(share->tenant));
}

int aim_share_cap(const struct aim_share *share, uint64_t *cap, uint64_t *used)
{
    if (share == NULL || share->broken || !owns(share))
        return 0;
    *cap = load(&share->tenant->cap_bytes);
    *used = total(share->tenant);
    return 1;
}

int aim_cap(int device, uint64_t *cap, uint64_t *used) { return aim_share_cap(aim_share_of(device), cap, used); }
