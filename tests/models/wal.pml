/* Tables of a timeline with a WAL, whose data is handed over to another rendition while others write.

   What is real behind each step:
     committer         timeline.wal_timeline.WalLine.sender: one append to the WAL, at its upper
     applier           timeline.wal_apply.apply_table: it looks (WalLine.look, lacking), asks for the promise
                       (catalog.promotion, catalog.renditions: R.upper), looks at the span again, and appends to
                       each rendition what lies beyond that one's upper (an append that is definite)
     controller        catalog.handover: the new rendition follows from a time on that is not promised yet
     copier            catalog.copies: the new rendition gets what the old one has before that time
     truncation        timeline.wal_apply.fetch_lag, timeline.wal_truncation: first the WAL is read, then the tables
     reader            timeline.wal_timeline.WalLine.settled: what the rendition has, and what the WAL has beyond it

   Bounds: times 0 to T-1, each one a commit to the one table; two renditions; APPLIERS appliers, which may stop between
   any two steps, for ever; one handover; TRUNCATIONS passes.
   What is not modelled: several tables of one commit (a commit is one append), kept deletes, drops, sizes, leases: shard.pml.

   Rendition 0 is the table first; 1 follows from time th on; th is 99 as long as there is no handover. */

#ifndef T
#define T 3
#endif
#ifndef APPLIERS
#define APPLIERS 2
#endif
#ifndef TRUNCATIONS
#define TRUNCATIONS 1
#endif
#define NONE 99

byte wu = 0;            /* the WAL's upper */
bool gone[T];           /* what the WAL has given up */
byte u[2];              /* uppers of the renditions */
byte has[2 * T];        /* how often the commit of a time is in a rendition: has[T * rendition + time] */
byte promised = 0, th = NONE;
/* appliers: what they saw */
byte apc[2], aw[2], ath[2], ar[2], astart[2], aend[2];
byte kpc = 0, kn = 0, kw = 0, keep = 0;
hidden byte i, j, x, y;
hidden byte is_once, is_whole, is_ended;

#define ACTIVE(t) (th <= (t) -> 1 : 0)
#define HAS(r, t) has[T * (r) + (t)]
#ifdef SHOW
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
#define TELL printf(" | wal=%d promised=%d handover=%d uppers=%d,%d\n", wu, promised, th, u[0], u[1])
#else
#define STEP(who, n, what, arg) skip
#define TELL skip
#endif

inline check() {
    is_once = true; is_whole = true; i = 0;
    do
    :: i < T ->
        if :: HAS(0, i) > 1 || HAS(1, i) > 1 -> is_once = false :: else fi;
        /* a reader as of a time finds all commits up to it: in the rendition that has the time, or in the WAL. Where that
           one is not copied yet, it waits: then they are in the old one, or in the WAL */
        if
        :: i < wu ->
            y = (th <= i && u[1] >= th -> 1 : 0); j = 0;
            do
            :: j <= i ->
                if
                :: u[y] > j && (y == 1 || j < th) -> if :: HAS(y, j) != 1 -> is_whole = false :: else fi
                :: else -> if :: gone[j] -> is_whole = false :: else fi
                fi;
                j++
            :: else -> break
            od
        :: else
        fi;
        i++
    :: else -> break
    od;
    is_ended = (u[0] <= th);    /* the old rendition gets nothing from the time on at which the new one follows */
    assert(is_once); assert(is_whole); assert(is_ended)
}

/* An append to rendition r of what the WAL has in [low, high): what lies beyond its upper. It is refused beyond a gap. */
inline add(r, low, high) {
#ifdef MUTANT_applied_twice
    j = low;            /* at what it saw before, and not at the upper that is there */
#else
    j = u[r];
#endif
    if
    :: u[r] >= low ->
        do :: j < high -> HAS(r, j)++; j++ :: else -> break od;
        if :: u[r] < high -> u[r] = high :: else fi
    :: else
    fi
}

#ifdef MUTANT_applies_without_a_promise
#define ASK(a) skip
#else
#define ASK(a) if :: promised < aw[a] -> promised = aw[a] :: else fi
#endif
#ifdef MUTANT_span_not_looked_at_again
#define SAME(a) true
#else
#define SAME(a) (ar[a] == 1 || th == ath[a])
#endif

#define APPLIER(a) \
/* it looks: the WAL's upper, the renditions, and which piece of which one is missing */ \
:: d_step { apc[a] == 0 && u[0] < (th < wu -> th : wu) -> \
    aw[a] = wu; ath[a] = th; ar[a] = 0; astart[a] = u[0]; aend[a] = (th < wu -> th : wu); apc[a] = 1; STEP(applier, a, look_old, wu) } \
:: d_step { apc[a] == 0 && th != NONE && u[1] >= th && u[1] < wu -> \
    aw[a] = wu; ath[a] = th; ar[a] = 1; astart[a] = u[1]; aend[a] = wu; apc[a] = 1; STEP(applier, a, look_new, wu) } \
/* the promise first; then the span may not have changed */ \
:: d_step { apc[a] == 1 -> ASK(a); apc[a] = 2; STEP(applier, a, promise, promised) } \
:: d_step { apc[a] == 2 && !SAME(a) -> apc[a] = 0; aw[a] = 0; ath[a] = 0; ar[a] = 0; astart[a] = 0; aend[a] = 0; STEP(applier, a, look_again, 0) } \
:: d_step { apc[a] == 2 && SAME(a) -> \
    add(ar[a], astart[a], aend[a]); \
    apc[a] = 0; aw[a] = 0; ath[a] = 0; ar[a] = 0; astart[a] = 0; aend[a] = 0; STEP(applier, a, append, 0) }

#ifdef MUTANT_handover_below_the_promise
#define FREE(t) true
#else
#define FREE(t) (promised <= (t))
#endif
#define HANDOVER(t) \
:: d_step { th == NONE && t < T && FREE(t) -> th = t; if :: promised <= t -> promised = t + 1 :: else fi; STEP(controller, 0, hand_over, t) }

#ifdef MUTANT_copied_as_far_as_promised
#define COPIED (promised < th -> promised : th)
#else
#define COPIED (u[0] < th -> u[0] : th)
#endif
/* The copy needs no handover: it may begin before, and ends at the time of it. */
#define COPIER \
:: d_step { u[1] < COPIED -> \
    j = u[1]; x = COPIED; \
    do :: j < x -> HAS(1, j) = HAS(1, j) + HAS(0, j); j++ :: else -> break od; \
    u[1] = x; STEP(copier, 0, copy, x) }

inline needed() { /* from when on somebody needs what the WAL has; more than that is done */
    keep = kw;
#ifdef MUTANT_truncated_before_it_is_applied
    skip
#else
    y = (th < kw -> th : kw);
#ifndef MUTANT_truncation_forgets_the_old_rendition
    if :: u[0] < y && u[0] < keep -> keep = u[0] :: else fi;
#endif
    if :: th != NONE && th < keep && u[1] < keep -> keep = (u[1] > th -> u[1] : th) :: else fi
#endif
}

#define TRUNCATION \
:: d_step { kpc == 0 && kn < TRUNCATIONS && wu > 0 -> kn++; kw = wu; kpc = 1; STEP(truncation, 0, read_wal, wu) } \
:: d_step { kpc == 1 -> needed(); kpc = 2; STEP(truncation, 0, read_tables, keep) } \
:: d_step { kpc == 2 -> \
    j = 0; do :: j < keep -> gone[j] = true; j++ :: else -> break od; \
    kpc = 0; kw = 0; x = keep; keep = 0; STEP(truncation, 0, retract, x) }

active proctype wal() {
    do
    :: atomic {
        if
        :: d_step { wu < T -> wu++; STEP(committer, 0, commit, wu) }
        APPLIER(0)
#if APPLIERS > 1
        APPLIER(1)
#endif
        HANDOVER(0) HANDOVER(1) HANDOVER(2)
        COPIER
        TRUNCATION
        fi;
        d_step { TELL; check() }
    }
    od
}
