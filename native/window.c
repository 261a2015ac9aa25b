/* A tenant on several GPUs is gated on all of them together: a collective of which one rank is launched and another is held back
 * would spin on the first GPU, beside the critical tenant that it was supposed to make way for.
 *
 * The GPUs of the tenant share a launch window, numbered in its first region. It opens when no higher tenant on any of them has
 * work, and closes when one has. After it closed, a process that launched less in that window than another may catch up, and
 * one whose peer waits for unfinished work may launch, since that work may wait for it. */
#include "gate.h"

enum { STUCK_NS = 5000000 };

static struct aim_tenant *group(void)
{
    const struct aim_share *first = aim_share_at(0);
    return first == NULL || first->broken ? NULL : first->tenant;
}

int aim_window_is_shared(void) { return aim_share_count() > 1; }

static uint64_t higher_idle_at(uint64_t now)
{
    uint64_t when = now;
    for (int i = 0; i < aim_share_count(); i++) {
        const struct aim_share *share = aim_share_at(i);
        uint64_t one = share->broken ? now : aim_higher_idle_at(share, NULL, now);
        when = one > when ? one : when;
    }
    return when;
}

uint64_t aim_window_at(const struct aim_launch *launch, uint64_t now)
{
    struct aim_tenant *tenant = group();
    if (tenant == NULL)
        return aim_higher_idle_at(launch->share, NULL, now);
    uint64_t when = higher_idle_at(now), window = load(&tenant->window);
    if ((when <= now) != (window % 2 == 1)) /* opens, or closes */
        __atomic_compare_exchange_n(&tenant->window, &window, window + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return when;
}

static uint64_t current(const struct aim_tenant *tenant) { return (load(&tenant->window) - 1) | 1; } /* the last that opened */

static int is_ahead(const struct aim_process *peer, const struct aim_process *mine, uint64_t window, uint64_t now)
{
    uint64_t launches = load(&mine->window) == window ? load(&mine->window_launches) : 0;
    if (peer == mine || load(&peer->state) != AIM_ACTIVE || load(&peer->window) != window ||
        load(&peer->launched) == load(&peer->done))
        return 0;
    if (load(&peer->window_launches) > launches)
        return 1;
    uint64_t since = load(&peer->launch_ns);
    return load(&peer->waiting) != 0 && load(&mine->launched) == load(&mine->done) && since < now && now - since > STUCK_NS;
}

int aim_window_must_follow(const struct aim_launch *launch, uint64_t now)
{
    const struct aim_tenant *tenant = group();
    if (tenant == NULL || load(&tenant->window) % 2 == 1 || load(&tenant->window) == 0)
        return 0;
    uint64_t window = current(tenant);
    for (int i = 0; i < aim_share_count(); i++) {
        const struct aim_share *share = aim_share_at(i);
        for (uint32_t p = 0; !share->broken && p < aim_processes(share->tenant); p++)
            if (is_ahead(&share->tenant->processes[p], launch->slot, window, now))
                return 1;
    }
    return 0;
}

void aim_window_launched(const struct aim_launch *launch)
{
    const struct aim_tenant *tenant = group();
    if (tenant == NULL)
        return;
    uint64_t window = current(tenant);
    if (load(&launch->slot->window) != window) {
        store(&launch->slot->window_launches, 0);
        store(&launch->slot->window, window);
    }
    add(&launch->slot->window_launches, 1);
}
