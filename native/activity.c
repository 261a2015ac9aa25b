/* Whether a higher tenant has work: what the gateway signals, what was launched and not yet waited for, and, without signals,
 * how long the tenant's pauses usually are. */
#include "gate.h"

enum { BUCKETS = 40, FIRST_OCTAVE = 13, MOST_COUNT = 4096, STEP_PAUSE_NS = 5000000 };

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t quiet_time(const struct aim_header *header, const struct aim_tenant *tenant)
{
    uint64_t quiet = load(&tenant->quiet_ns), least = load(&header->quiet_min_ns), most = load(&header->quiet_max_ns);
    return quiet == 0 ? most : quiet < least ? least : quiet > most ? most : quiet;
}

static uint64_t last_activity(const struct aim_process *process)
{
    return later(load(&process->asked_ns), later(load(&process->launch_ns), load(&process->done_ns)));
}

/* One process without signals: busy while a thread waits for what it launched, then until it was quiet long enough. Work that
 * no thread waits for (a model that is being loaded) counts for a shorter time. */
static uint64_t process_idle_at(const struct aim_header *header, const struct aim_tenant *tenant,
                                const struct aim_process *process, uint64_t ended, uint64_t now)
{
    uint64_t launched = load(&process->launched), launch_ns = load(&process->launch_ns);
    if (launched == 0 || (ended != 0 && ended >= launch_ns))
        return now;
    if (launched != load(&process->done)) {
        uint64_t sign = last_activity(process);
        uint64_t bound = load(load(&process->waiting) != 0 ? &header->hang_ns : &header->unwaited_ns);
        return sign > now || now - sign < bound ? now + 100000 : now;
    }
    uint64_t since = later(launch_ns, load(&process->done_ns)), quiet = quiet_time(header, tenant);
    return since + quiet > now && since <= now ? since + quiet : now;
}

uint64_t aim_tenant_idle_at(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t now)
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
        life = later(life, last_activity(process));
        when = later(when, process_idle_at(header, tenant, process, ended, now));
    }
    if (running == 0)
        return when;
    /* A request runs; trusted as long as the tenant shows activity. */
    return life > now || now - life < load(&header->hang_ns) ? now + 20000000 : now;
}

int aim_tenant_has_signals(const struct aim_tenant *tenant)
{
    for (uint32_t i = 0; i < AIM_WRITERS; i++)
        if (load(&tenant->writers[i].begun_ns) != 0)
            return 1;
    return 0;
}

/* Since when the tenant has been idle, if it is; 0: it never had work. */
uint64_t aim_tenant_idle_since(const struct aim_tenant *tenant)
{
    uint64_t since = 0;
    if (aim_tenant_has_signals(tenant)) {
        for (uint32_t i = 0; i < AIM_WRITERS; i++)
            since = later(since, load(&tenant->writers[i].ended_ns));
        return since;
    }
    for (uint32_t i = 0; i < aim_processes(tenant); i++)
        since = later(since, later(load(&tenant->processes[i].launch_ns), load(&tenant->processes[i].done_ns)));
    return since;
}

static uint64_t last_launch(const struct aim_tenant *tenant)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++)
        last = later(last, load(&tenant->processes[i].launch_ns));
    return last;
}

/* When it last had a request or work. */
uint64_t aim_tenant_last_sign(const struct aim_tenant *tenant)
{
    uint64_t last = last_launch(tenant);
    for (uint32_t i = 0; i < AIM_WRITERS; i++)
        last = later(last, later(load(&tenant->writers[i].begun_ns), load(&tenant->writers[i].ended_ns)));
    for (uint32_t i = 0; i < aim_processes(tenant); i++)
        last = later(last, load(&tenant->processes[i].done_ns));
    return last;
}

/* Whether its only request is on its way to the engine, or the engine has not launched anything for it. */
int aim_tenant_is_preparing(const struct aim_tenant *tenant)
{
    uint64_t running = 0, begun = 0, since;
    for (uint32_t i = 0; i < AIM_WRITERS; i++) {
        running += load(&tenant->writers[i].running);
        begun = later(begun, load(&tenant->writers[i].begun_ns));
    }
    return running == 1 && begun > last_launch(tenant) && aim_tenant_device_idle(tenant, &since);
}

/* Requests, counted where a request begins while none runs; without signals, busy periods. */
uint64_t aim_tenant_requests(const struct aim_tenant *tenant)
{
    uint64_t sum = 0, most = 0;
    for (uint32_t i = 0; i < AIM_WRITERS; i++)
        sum += load(&tenant->writers[i].begun);
    if (sum != 0)
        return sum;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) /* processes of one model work on the same requests */
        most = later(most, load(&tenant->processes[i].bursts));
    return most;
}

uint64_t aim_tenant_begun_ns(const struct aim_tenant *tenant)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < AIM_WRITERS; i++)
        last = later(last, load(&tenant->writers[i].begun_ns));
    for (uint32_t i = 0; last == 0 && i < aim_processes(tenant); i++)
        last = later(last, load(&tenant->processes[i].burst_began_ns));
    return last;
}

uint64_t aim_tenant_request_ns(const struct aim_tenant *tenant)
{
    uint64_t typical = 0;
    for (uint32_t i = 0; i < AIM_WRITERS; i++)
        typical = later(typical, load(&tenant->writers[i].request_ns));
    for (uint32_t i = 0; typical == 0 && i < aim_processes(tenant); i++)
        typical = later(typical, load(&tenant->processes[i].burst_ns));
    return typical;
}

/* Whether everything that its processes launched is known to be finished, and since when. */
int aim_tenant_device_idle(const struct aim_tenant *tenant, uint64_t *since)
{
    *since = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        if (load_acquire(&process->state) != AIM_ACTIVE)
            continue;
        if (load(&process->launched) != load(&process->done))
            return 0;
        *since = later(*since, later(load(&process->launch_ns), load(&process->done_ns)));
    }
    return 1;
}

uint64_t aim_higher_idle_at(const struct aim_share *share, struct aim_launch *launch, uint64_t now)
{
    uint64_t when = now;
    uint32_t rank = load(&share->tenant->rank);
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        const struct aim_header *header = &share->region->header;
        if (load(&tenant->state) == AIM_ACTIVE && load(&tenant->rank) > rank && aim_processes(tenant) > 0)
            when = later(when, aim_yield_at(header, tenant, launch, aim_tenant_idle_at(header, tenant, now), now));
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

/* Pauses of this process, in half octaves from 8 us. */
static struct {
    uint64_t count, sum;
} pauses[BUCKETS];
static uint64_t pause_count;

static unsigned bucket(uint64_t pause, unsigned count)
{
    int octave = 63 - __builtin_clzll(pause | 1);
    int at = (octave - FIRST_OCTAVE) * 2 + (int)(pause >> (octave > 0 ? octave - 1 : 0) & 1);
    return at < 0 ? 0 : (unsigned)at >= count ? count - 1 : (unsigned)at;
}

unsigned aim_pause_bucket(uint64_t pause) { return bucket(pause, AIM_PAUSES); }

uint64_t aim_pause_upper(unsigned at)
{
    uint64_t octave = 1ull << (FIRST_OCTAVE + at / 2);
    return at % 2 == 0 ? octave + octave / 2 : octave * 2;
}

/* The shortest wait after which the expected remaining idle time exceeds ten best-effort batches. */
static uint64_t choose_quiet(uint64_t batch, uint64_t most)
{
    uint64_t count = 0, sum = 0, best = most;
    for (int at = BUCKETS - 1; at >= 0; at--) {
        uint64_t wait = aim_pause_upper(at < 1 ? 0 : (unsigned)at - 1);
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

static void learn_quiet(const struct aim_share *share, uint64_t pause)
{
    unsigned at = bucket(pause, BUCKETS);
    add(&pauses[at].count, 1);
    add(&pauses[at].sum, pause);
    uint64_t seen = add(&pause_count, 1) + 1;
    if (seen % 64 != 0)
        return;
    const struct aim_header *header = &share->region->header;
    uint64_t batch = load(&header->gap_ns), most = load(&header->long_ns);
    if (batch == 0 || batch > most) /* long launches are held back for the pause itself, not for the quiet time */
        batch = batch == 0 ? 2000000 : most;
    uint64_t quiet = choose_quiet(batch, load(&header->quiet_max_ns));
    store(&share->tenant->quiet_ns, quiet + quiet / 4 + 1);
    if (seen % 4096 == 0)
        for (int i = 0; i < BUCKETS; i++) {
            store(&pauses[i].count, load(&pauses[i].count) / 2);
            store(&pauses[i].sum, load(&pauses[i].sum) / 2);
        }
}

static void note_tenant_pause(struct aim_tenant *tenant, uint64_t pause)
{
    if (add(&tenant->pauses[aim_pause_bucket(pause)], 1) < MOST_COUNT)
        return;
    for (unsigned i = 0; i < AIM_PAUSES; i++) /* older pauses count less */
        store(&tenant->pauses[i], load(&tenant->pauses[i]) / 2);
}

static void note_step_pause(const struct aim_share *share, uint64_t pause)
{
    struct aim_tenant *tenant = share->tenant;
    uint64_t old = load(&tenant->step_pause_ns);
    if (pause > STEP_PAUSE_NS)
        return;
    store(&tenant->step_pause_ns, old == 0 ? pause : (15 * old + pause) / 16);
    add(&share->region->header.step_pauses[aim_pause_bucket(pause)], 1);
}

static void begin_burst(struct aim_process *slot, uint64_t ended, uint64_t now)
{
    uint64_t began = load(&slot->burst_began_ns), old = load(&slot->burst_ns);
    uint64_t length = began != 0 && ended > began ? ended - began : 0;
    if (length != 0)
        store(&slot->burst_ns, old == 0 ? length : (7 * old + length) / 8);
    store(&slot->burst_began_ns, now);
    add(&slot->bursts, 1);
}

/* Called before a launch is counted. */
void aim_pause_noted(const struct aim_share *share, struct aim_process *slot, uint64_t now)
{
    const struct aim_header *header = &share->region->header;
    uint64_t launched = load(&slot->launched), last = later(load(&slot->launch_ns), load(&slot->done_ns));
    int done = launched == load(&slot->done);
    if (load(&share->tenant->rank) == 0)
        return; /* no tenant is gated by the lowest rank */
    if (launched == 0 || last >= now) {
        if (launched == 0)
            begin_burst(slot, 0, now);
        return;
    }
    uint64_t pause = now - last, unwaited = load(&header->unwaited_ns);
    if (done) {
        learn_quiet(share, pause);
        note_step_pause(share, pause);
    }
    if (!done && pause < unwaited)
        return;
    if (!aim_tenant_has_signals(share->tenant))
        note_tenant_pause(share->tenant, pause);
    if (pause >= quiet_time(header, share->tenant))
        begin_burst(slot, last, now);
}
