/* Slots, charges and caps. A process adds what it wants to its own slot, sums the slots of its tenant, and takes it back where
 * the sum exceeds the cap: so the cap holds without any lock. Each STEP is a step of the model in native/model. */
#include "aim.h"
#include "steps.h"

#include <string.h>

enum { BESIDE_GRAIN = 16 << 20 };

static uint64_t place(const struct aim_share *share, const struct aim_process *slot)
{
    return (uint64_t)(slot - share->tenant->processes);
}

static int is_held(const struct aim_share *share, const struct aim_process *slot)
{
    return slot != NULL && STEP(S_HELD, place(share, slot), load(&slot->state) == AIM_ACTIVE && aim_is_own_process(slot));
}

static int owns(const struct aim_share *share)
{
    const struct aim_tenant *tenant = share->tenant;
    return load(&tenant->state) == AIM_ACTIVE && load(&tenant->epoch) == share->epoch;
}

static uint64_t plus(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

static uint64_t bytes_of(const struct aim_process *process)
{
    if (__atomic_load_n(&process->state, __ATOMIC_SEQ_CST) != AIM_ACTIVE)
        return 0;
    return plus(__atomic_load_n(&process->used_bytes, __ATOMIC_SEQ_CST), load(&process->context_bytes));
}

static uint64_t total(const struct aim_tenant *tenant)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++)
        sum = plus(sum, STEP(S_SUMMED, i, bytes_of(&tenant->processes[i])));
    return sum;
}

static uint64_t cap_of(const struct aim_tenant *tenant)
{
    return STEP(S_CAP, 0, __atomic_load_n(&tenant->cap_bytes, __ATOMIC_SEQ_CST));
}

static uint64_t take_away(uint64_t *counter, uint64_t bytes)
{
    uint64_t old = load(counter);
    while (!__atomic_compare_exchange_n(counter, &old, old > bytes ? old - bytes : 0, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
    return bytes;
}

static void charge(const struct aim_share *share, struct aim_process *slot, uint64_t bytes)
{
    STEP(S_ADD, place(share, slot), (__atomic_fetch_add(&slot->used_bytes, bytes, __ATOMIC_SEQ_CST), bytes));
}

static void uncharge(const struct aim_share *share, struct aim_process *slot, uint64_t bytes)
{
    STEP(S_TAKE_AWAY, place(share, slot), take_away(&slot->used_bytes, bytes));
}

/* What this process holds, which a place begins with. */
static void hold(struct aim_share *share, uint64_t bytes)
{
    STEP(S_HOLDS, 0, (add(&share->held, bytes), load(&share->held)));
}

static void hold_less(struct aim_share *share, uint64_t bytes)
{
    STEP(S_HOLDS, 0, (take_away(&share->held, bytes), load(&share->held)));
}

static void set_free(const struct aim_share *share, struct aim_process *slot)
{
    STEP(S_SET_FREE, place(share, slot), (store_release(&slot->state, AIM_FREE), 0));
}

/* Whether its process is dead, or died while it took the place. */
static int is_left(const struct aim_share *share, const struct aim_process *process)
{
    uint32_t now = STEP(S_LEFT, place(share, process), load(&process->state));
    if (now != AIM_ACTIVE && now != AIM_CLAIMED)
        return 0;
    aim_step_begins();
    int is_alive = now == AIM_ACTIVE ? aim_is_alive(share, process) : aim_life_is_held(share, process);
    aim_step_ends(is_alive ? S_SEIZE : S_NO_STEP, place(share, process), 0);
    return !is_alive;
}

/* Releases what dead processes held, and places that they were about to take; only with the tenant's lock. */
static void reap(const struct aim_share *share, enum aim_lock how)
{
    struct aim_tenant *tenant = share->tenant;
    for (uint32_t i = 0; how == AIM_LOCKED && i < AIM_PROCESSES; i++) {
        struct aim_process *process = &tenant->processes[i];
        if (process == share->slot || !is_left(share, process) || !STEP(S_SEIZE, i, aim_life_seize(share, process, 1)))
            continue;
        if (is_left(share, process)) /* nobody can claim it now */
            set_free(share, process);
        STEP(S_RELEASE, i, aim_life_seize(share, process, 0));
    }
}

static int is_free(uint32_t state) { return state != AIM_ACTIVE && state != AIM_CLAIMED; }

static int claim(struct aim_process *process)
{
    uint32_t now = load(&process->state);
    return is_free(now) &&
           __atomic_compare_exchange_n(&process->state, &now, AIM_CLAIMED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static int raise_high(struct aim_tenant *tenant, uint32_t i)
{
    uint32_t high = load(&tenant->process_high);
    while (high <= i)
        if (__atomic_compare_exchange_n(&tenant->process_high, &high, i + 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return 1;
    return 0;
}

/* The lock for life is taken first: a place that is claimed while its lock is free was left by a process that died over it. */
static struct aim_process *claim_slot(struct aim_share *share)
{
    struct aim_tenant *tenant = share->tenant;
    for (uint32_t i = 0; i < AIM_PROCESSES; i++) {
        struct aim_process *process = &tenant->processes[i];
        if (!is_free(STEP(S_LOOK, i, load(&process->state))) || !STEP(S_LIFE, i, aim_life_take(share, process)) ||
            !STEP(S_CLAIM, i, claim(process)))
            continue;
        STEP(S_HIGH, i, raise_high(tenant, i));
        return process;
    }
    STEP(S_NO_PLACE, 0, (aim_life_drop(share), 0));
    return NULL;
}

static void leave(struct aim_share *share, struct aim_process *slot)
{
    set_free(share, slot);
    STEP(S_DROP, 0, (aim_life_drop(share), 0)); /* after it: nobody may take this place for one of a dead process */
}

static int is_former_self(const struct aim_process *process)
{
    return load(&process->state) == AIM_ACTIVE && aim_is_own_process(process);
}

/* What this process was before it called exec had a slot; what it held is gone. Only with the tenant's lock: who else has seen
 * that nobody holds this place must not free it when it has its next owner. */
static void forget_former_self(struct aim_share *share, enum aim_lock *how)
{
    for (uint32_t i = 0; i < aim_processes(share->tenant); i++) {
        struct aim_process *process = &share->tenant->processes[i];
        if (!STEP(S_FORMER, i, is_former_self(process)))
            continue;
        aim_lock_tenant(share, how);
        if (*how == AIM_LOCKED && STEP(S_FORMER, i, is_former_self(process)))
            set_free(share, process);
    }
}

void aim_forget_former_self(struct aim_share *share)
{
    enum aim_lock how = aim_lock_threads(share);
    if (how == AIM_NO_FILE)
        return;
    forget_former_self(share, &how);
    aim_unlock(share, how);
}

/* What is left of its charge: 0. */
static uint64_t wipe(struct aim_process *slot)
{
    memset((char *)slot + sizeof slot->state, 0, sizeof *slot - sizeof slot->state);
    return plus(load(&slot->used_bytes), load(&slot->context_bytes));
}

/* Places are taken by compare and swap: the lock is needed only where those of dead processes have to be freed first. */
static struct aim_process *attach(struct aim_share *share, enum aim_lock *how)
{
    struct aim_tenant *tenant = share->tenant;
    forget_former_self(share, how);
    struct aim_process *slot = claim_slot(share);
    if (slot == NULL) {
        aim_lock_tenant(share, how);
        reap(share, *how);
        slot = claim_slot(share);
    }
    if (slot == NULL)
        return NULL;
    STEP(S_WIPE, place(share, slot), wipe(slot));
    aim_life_describe(slot);
    store(&slot->life_locked, (uint64_t)share->life);
    store(&slot->attached_ns, aim_now());
    STEP(S_SET_USED, place(share, slot), (store(&slot->used_bytes, load(&share->held)), load(&slot->used_bytes)));
    STEP(S_SET_CONTEXT, place(share, slot), (store(&slot->context_bytes, load(&tenant->context_bytes)), load(&slot->context_bytes)));
    STEP(S_ACTIVATE, place(share, slot), (__atomic_store_n(&slot->state, AIM_ACTIVE, __ATOMIC_SEQ_CST), 0));
    if (owns(share))
        return slot;
    leave(share, slot); /* the tenant was removed meanwhile */
    return NULL;
}

struct aim_process *aim_attach(struct aim_share *share)
{
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL)
        return slot;
    enum aim_lock how = share->tenant == NULL ? AIM_NO_FILE : aim_lock_threads(share);
    if (how == AIM_NO_FILE)
        return NULL;
    slot = share->slot;
    if (slot == NULL && owns(share))
        slot = attach(share, &how);
    store_release(&share->slot, slot);
    aim_unlock(share, how);
    return slot;
}

int aim_tenant_is_ours(const struct aim_share *share) { return owns(share); }

int aim_slot_is_ours(struct aim_share *share)
{
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot == NULL || (owns(share) && is_held(share, slot)))
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
static int add_within_cap(const struct aim_share *share, uint64_t bytes, uint64_t *sum)
{
    struct aim_tenant *tenant = share->tenant;
    uint64_t used = __atomic_load_n(&share->slot->used_bytes, __ATOMIC_SEQ_CST);
    *sum = total(tenant);
    if (bytes > UINT64_MAX / 4 || used > UINT64_MAX / 4 || plus(*sum, bytes) > cap_of(tenant))
        return 0; /* would not fit now; the sum with it must not be shown to others */
    charge(share, share->slot, bytes);
    *sum = total(tenant);
    if (*sum <= cap_of(tenant))
        return 1;
    uncharge(share, share->slot, bytes);
    return 0;
}

static void note_sum(struct aim_tenant *tenant, uint64_t sum)
{
    for (uint64_t peak = load(&tenant->peak_bytes); sum > peak;)
        if (__atomic_compare_exchange_n(&tenant->peak_bytes, &peak, sum, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* Far from the cap, without the lock: no other process is refused because of what is taken back at once. 0: not decided. */
static int reserve_far(struct aim_share *share, uint64_t bytes)
{
    struct aim_process *slot = share == NULL || share->broken ? NULL : load_acquire(&share->slot);
    if (slot == NULL || !owns(share) || !is_held(share, slot))
        return 0;
    const struct aim_tenant *tenant = share->tenant;
    uint64_t cap = cap_of(tenant), sum = total(tenant);
    if (bytes > UINT64_MAX / 4 || plus(sum, bytes) > cap - cap / 8)
        return 0;
    hold(share, bytes); /* first: a slot that is attached meanwhile begins with it */
    charge(share, slot, bytes);
    sum = total(tenant);
    if (STEP(S_FAR, place(share, slot),
             sum <= __atomic_load_n(&tenant->cap_bytes, __ATOMIC_SEQ_CST) && load_acquire(&share->slot) == slot &&
                 load(&slot->state) == AIM_ACTIVE)) {
        note_sum(share->tenant, sum);
        return 1;
    }
    uncharge(share, slot, bytes);
    hold_less(share, bytes);
    return 0;
}

static int reserve(int device, uint64_t bytes, int counts)
{
    static int said;
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (reserve_far(share, bytes))
        return 1;
    if (decided(share, &allowed))
        return allowed;
    struct aim_tenant *tenant = share->tenant;
    enum aim_lock how = aim_lock_threads(share);
    if (how == AIM_NO_FILE) {
        aim_say_once(&said, "%s cannot be locked: allocations are %s", share->path,
                     aim_fail_closed ? "refused (fail closed)" : "NOT limited (fail open)");
        return !aim_fail_closed;
    }
    aim_lock_tenant(share, &how);
    if (!is_held(share, share->slot))
        store_release(&share->slot, attach(share, &how));
    uint64_t sum = 0;
    if (share->slot != NULL) {
        allowed = add_within_cap(share, bytes, &sum);
        if (!allowed) {
            reap(share, how);
            allowed = add_within_cap(share, bytes, &sum);
        }
    }
    if (allowed) {
        hold(share, bytes);
        note_sum(tenant, sum);
    } else {
        add(&tenant->denied, (uint64_t)counts);
    }
    aim_unlock(share, how);
    return allowed;
}

int aim_reserve(int device, uint64_t bytes) { return reserve(device, bytes, 1); }
int aim_try_reserve(int device, uint64_t bytes) { return reserve(device, bytes, 0); }
void aim_count_refusal(int device)
{
    const struct aim_share *share = aim_share_of(device);
    if (share != NULL && !share->broken && owns(share))
        add(&share->tenant->denied, 1);
}

/* 0: with its context this process would exceed the cap. Its place is given up again where another process was faster. */
static int attach_within_cap(struct aim_share *share, enum aim_lock *how, uint64_t cap)
{
    uint64_t context = load(&share->tenant->context_bytes);
    struct aim_process *slot = NULL;
    if (context == 0 || plus(total(share->tenant), context) <= cap)
        slot = attach(share, how);
    if (slot != NULL && context != 0 && total(share->tenant) > cap_of(share->tenant)) {
        leave(share, slot);
        slot = NULL;
    }
    store_release(&share->slot, slot);
    return slot != NULL; /* without a slot its context would not be charged */
}

/* A process is charged for its first context before it has one. Far from the cap without the tenant's lock, so that many
 * processes that start at once do not wait for each other. */
int aim_admit_context(int device)
{
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (decided(share, &allowed))
        return allowed;
    enum aim_lock how = aim_lock_threads(share);
    if (how == AIM_NO_FILE)
        return !aim_fail_closed;
    struct aim_tenant *tenant = share->tenant;
    uint64_t cap = cap_of(tenant);
    allowed = is_held(share, share->slot);
    if (!allowed) {
        forget_former_self(share, &how);
        allowed = attach_within_cap(share, &how, cap - cap / 8);
    }
    if (!allowed) {
        aim_lock_tenant(share, &how);
        if (plus(total(tenant), load(&tenant->context_bytes)) > cap)
            reap(share, how);
        allowed = attach_within_cap(share, &how, cap);
        if (!allowed)
            add(&tenant->denied, 1);
    }
    aim_unlock(share, how);
    return allowed;
}

/* What the driver holds for this process beside what is counted, as measured: with some room, since it grows in small steps. */
void aim_charge_beside(struct aim_share *share, uint64_t bytes, int exact)
{
    enum aim_lock how = share->tenant == NULL ? AIM_NO_FILE : aim_lock_threads(share);
    if (how == AIM_NO_FILE)
        return;
    aim_lock_tenant(share, &how);
    struct aim_process *slot = share->slot;
    if (owns(share) && is_held(share, slot)) {
        uint64_t least = load(&share->tenant->context_bytes), want = least;
        if (bytes > least)
            want = (bytes + BESIDE_GRAIN - 1) / BESIDE_GRAIN * BESIDE_GRAIN;
        if (exact || want > load(&slot->context_bytes))
            store(&slot->context_bytes, want);
        store(&slot->measured_ns, aim_now());
    }
    aim_unlock(share, how);
}

void aim_give_back(int device, uint64_t bytes)
{
    struct aim_share *share = aim_share_of(device);
    if (share == NULL || share->broken || bytes == 0)
        return;
    hold_less(share, bytes);
    struct aim_process *slot = load_acquire(&share->slot);
    if (!is_held(share, slot))
        return;
    uncharge(share, slot, bytes);
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
