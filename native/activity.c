/* Whether a more important tenant has work: what the gateway says, what was launched and not yet waited for, and, where
 * nobody says anything, how long its pauses usually are. */
#include "gate.h"

enum { BUCKETS = 40, RECENT = 1024 };

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* One process without a gateway's word: busy while somebody waits for what it launched, then until it was quiet long enough.
 * Work that nobody waits for (a model that is being loaded) is believed for a shorter while. */
static uint64_t process_idle_at(const struct aim_header *header, const struct aim_tenant *tenant,
                                const struct aim_process *process, uint64_t ended, uint64_t now)
{
    uint64_t launched = load(&process->launched), launch_ns = load(&process->launch_ns);
    uint64_t done_ns = load(&process->done_ns);
    if (launched == 0 || (ended != 0 && ended >= launch_ns))
        return now;
    uint64_t quiet = load(&tenant->quiet_ns), least = load(&header->quiet_min_ns), most = load(&header->quiet_max_ns);
    quiet = quiet == 0 ? most : quiet < least ? least : quiet > most ? most : quiet;
    if (launched != load(&process->done)) {
        uint64_t sign = later(later(launch_ns, done_ns), load(&process->asked_ns));
        uint64_t bound = load(load(&process->waiting) != 0 ? &header->hang_ns : &header->unwaited_ns);
        return sign > now || now - sign < bound ? now + 100000 : now;
    }
    uint64_t since = later(launch_ns, done_ns);
    return since + quiet > now && since <= now ? since + quiet : now;
}

static uint64_t tenant_idle_at(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t now)
{
    uint64_t running = 0, ended = 0, life = 0, when = now;
    for (uint32_t i = 0; i < AIM_WRITERS; i++) {
        const struct aim_writer *writer = &tenant->writers[i];
        running += load(&writer->running);
        ended = later(ended, load(&writer->ended_ns));
        life = later(life, load(&writer->begun_ns));
    }
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        if (load_acquire(&process->state) != AIM_ACTIVE)
            continue;
        life = later(life, later(load(&process->asked_ns), later(load(&process->launch_ns), load(&process->done_ns))));
        when = later(when, process_idle_at(header, tenant, process, ended, now));
    }
    if (running == 0)
        return when;
    /* A request runs; believed as long as the tenant shows life. */
    return life > now || now - life < load(&header->hang_ns) ? now + 20000000 : now;
}

uint64_t aim_higher_idle_at(const struct aim_share *share, uint64_t now)
{
    uint64_t when = now;
    uint32_t rank = load(&share->tenant->rank);
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        if (load(&tenant->state) == AIM_ACTIVE && load(&tenant->rank) > rank && aim_processes(tenant) > 0)
            when = later(when, aim_yield_at(tenant, tenant_idle_at(&share->region->header, tenant, now), now));
    }
    return when;
}

int aim_higher_present(const struct aim_share *share)
{
    uint32_t rank = load(&share->tenant->rank);
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        if (load(&tenant->state) != AIM_ACTIVE || load(&tenant->rank) <= rank || aim_yields_all(tenant))
            continue;
        for (uint32_t p = 0; p < aim_processes(tenant); p++)
            if (load(&tenant->processes[p].state) == AIM_ACTIVE)
                return 1;
    }
    return 0;
}

/* Pauses between a tenant's work, in half octaves from 8 us to 8 s. */
static struct {
    uint64_t count, sum;
} pauses[BUCKETS];
static uint64_t pause_count;

static int bucket(uint64_t pause)
{
    int octave = 63 - __builtin_clzll(pause | 1);
    int at = (octave - 13) * 2 + (int)(pause >> (octave > 0 ? octave - 1 : 0) & 1);
    return at < 0 ? 0 : at >= BUCKETS ? BUCKETS - 1 : at;
}

static uint64_t upper(int at)
{
    uint64_t octave = 1ull << (13 + at / 2);
    return at % 2 == 0 ? octave + octave / 2 : octave * 2;
}

/* The shortest wait after which what is left of a pause is, on average, worth ten batches of the others. */
static uint64_t choose_quiet(uint64_t batch, uint64_t most)
{
    uint64_t count = 0, sum = 0, best = most;
    for (int at = BUCKETS - 1; at >= 0; at--) {
        uint64_t wait = upper(at - 1 < 0 ? 0 : at - 1);
        count += load(&pauses[at].count);
        sum += load(&pauses[at].sum);
        if (count == 0)
            continue;
        uint64_t mean = sum / count;
        if (mean >= wait && mean - wait >= 10 * batch)
            best = at == 0 ? 0 : wait;
    }
    return best < most ? best : most;
}

static void note_pause(const struct aim_share *share, uint64_t pause)
{
    int at = bucket(pause);
    add(&pauses[at].count, 1);
    add(&pauses[at].sum, pause);
    uint64_t seen = add(&pause_count, 1) + 1;
    if (seen % 64 != 0)
        return;
    const struct aim_header *header = &share->region->header;
    uint64_t batch = load(&header->gap_ns);
    uint64_t quiet = choose_quiet(batch == 0 ? 2000000 : batch, load(&header->quiet_max_ns));
    store(&share->tenant->quiet_ns, quiet + quiet / 4 + 1);
    if (seen % 4096 == 0)
        for (int i = 0; i < BUCKETS; i++) {
            store(&pauses[i].count, load(&pauses[i].count) / 2);
            store(&pauses[i].sum, load(&pauses[i].sum) / 2);
        }
}

void aim_launch_noted(const struct aim_share *share, struct aim_process *slot, uint64_t now)
{
    uint64_t launched = load(&slot->launched), done_ns = load(&slot->done_ns);
    if (launched != 0 && launched == load(&slot->done) && now > done_ns)
        note_pause(share, now - done_ns);
    store(&slot->launch_ns, now);
    add(&slot->launched, 1);
}

static struct {
    void *event;
    uint64_t launched;
} recent[RECENT];

static size_t place(const void *event) { return (size_t)(((uintptr_t)event * 0x9e3779b97f4a7c15u) >> 40) % RECENT; }

static struct aim_process *slot_of(const struct aim_driver *driver, struct aim_share **share)
{
    *share = aim_share_of(aim_only_device() >= 0 ? aim_only_device() : INSIDE(driver->device()));
    return *share == NULL || (*share)->broken ? NULL : load_acquire(&(*share)->slot);
}

static void done(const struct aim_share *share, struct aim_process *slot, uint64_t seen)
{
    if (load(&share->tenant->rank) == 0)
        return; /* nobody waits for the lowest */
    if (seen > load(&slot->done))
        store(&slot->done, seen);
    store(&slot->done_ns, aim_now());
}

void aim_event_recorded(const struct aim_driver *driver, void *event)
{
    struct aim_share *share;
    const struct aim_process *slot = slot_of(driver, &share);
    if (slot == NULL)
        return;
    size_t at = place(event);
    store(&recent[at].launched, load(&slot->launched));
    store_release(&recent[at].event, event);
}

/* A thread begins to wait for the device, or asks whether it is done. */
static void ask(struct aim_process *slot, int waits)
{
    store(&slot->asked_ns, aim_now());
    if (waits)
        add(&slot->waiting, 1);
}

static void stop_waiting(struct aim_process *slot)
{
    uint64_t count = load(&slot->waiting);
    while (count != 0 && !__atomic_compare_exchange_n(&slot->waiting, &count, count - 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

void aim_event_wait(const struct aim_driver *driver, int waits)
{
    struct aim_share *share;
    struct aim_process *slot = slot_of(driver, &share);
    if (slot != NULL)
        ask(slot, waits);
}

void aim_event_done(const struct aim_driver *driver, void *event, int waited, int finished)
{
    struct aim_share *share;
    struct aim_process *slot = slot_of(driver, &share);
    size_t at = place(event);
    if (slot == NULL)
        return;
    if (waited)
        stop_waiting(slot);
    if (!finished)
        return;
    if (load_acquire(&recent[at].event) == event && load(&recent[at].launched) > load(&slot->done))
        done(share, slot, load(&recent[at].launched));
    aim_pools_refresh(driver, -1);
}

uint64_t aim_sync_enter(const struct aim_driver *driver)
{
    struct aim_share *share;
    struct aim_process *slot = slot_of(driver, &share);
    if (slot == NULL)
        return 0;
    ask(slot, 1);
    return load(&slot->launched);
}

void aim_sync_leave(const struct aim_driver *driver, uint64_t seen, int finished)
{
    struct aim_share *share;
    struct aim_process *slot = slot_of(driver, &share);
    if (slot == NULL)
        return;
    stop_waiting(slot);
    if (!finished)
        return;
    done(share, slot, seen);
    aim_pools_refresh(driver, -1);
}
