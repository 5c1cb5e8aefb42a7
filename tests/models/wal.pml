/* Tables of a timeline with a WAL, whose data is handed over to another rendition while others write.

   What is real behind each step (see docs/design/0225-formal-models.md, and replay_wal.py, which carries out the steps):
     committer         timeline.wal_timeline.WalLine.sender: one append to the WAL, at its upper
     applier           timeline.wal_apply.apply_table: it looks (WalLine.look, lacking), asks for the promise
                       (catalog.promotion, catalog.renditions: R.upper), looks at the span again, and appends to
                       each rendition what lies beyond that one's upper (an append that is definite)
     controller        catalog.handover, catalog.effects.hand_over: the new rendition follows from a time on that is
                       neither promised nor before the WAL's upper; the WAL gets a mark there, in the same transaction
     copier            catalog.copies.copy_step: the promise, and then the new rendition gets what the old one has
                       before the handover
     truncation        timeline.wal_truncation.tidy: first the WAL's rows are read, then the tables (wal_apply.fetch_lag);
                       what is in them is retracted, by an append at the WAL's upper; then the WAL's hold moves
     reader            timeline.wal_timeline.WalLine.settled: what the rendition has, and what the WAL has beyond it

   Bounds: times 1 to T-1 (0 is complete when a WAL is made), each one a commit to the one table, a handover or a
   retraction; two renditions; APPLIERS appliers, which may stop between any two steps, for ever; one handover and one
   that is refused; TRUNCATIONS looks of one truncation.
   What is not modelled: several tables of one commit (a commit is one append), kept deletes, drops, sizes, leases: shard.pml.

   Rendition 0 is the table first; 1 follows from time th on; th is 99 as long as there is no handover. */

#ifndef T
#define T 4
#endif
#ifndef APPLIERS
#define APPLIERS 2
#endif
#ifndef TRUNCATIONS
#define TRUNCATIONS 2
#endif
#define NONE 99

byte wu = 1, since = 0; /* the WAL's upper, and up to when it has given up its history */
short com = 0, rows = 0;        /* times of commits, and of what is in the WAL (commits and the mark), as bits */
byte u[2];              /* uppers of the renditions */
byte has[2 * T];        /* how often the commit of a time is in a rendition: has[T * rendition + time] */
byte promised = 1, th = NONE;
bool early = false;     /* a handover at a time that was read or promised already */
/* appliers: what they saw */
byte apc[2], aw[2], ath[2], ar[2], astart[2], aend[2];
byte cpc = 0, cend = 0, hpc = 0, hat = 0, hn = 0;
byte kpc = 0, kn = 0, kw = 0, kx = 0; short kr = 0;
hidden byte i, j, x, y;
hidden short m;
hidden byte is_once, is_whole, is_ended, is_settled;

#define B(n) (1 << (n))
#define HAS(r, t) has[T * (r) + (t)]
#ifdef SHOW
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
inline told_all() {
    printf(" | wal=%d since=%d commits=%d rows=%d promised=%d handover=%d uppers=%d,%d", wu, since, com, rows, promised, th, u[0], u[1]);
    printf(" old="); j = 0; do :: j < T -> printf("%d,", HAS(0, j)); j++ :: else -> break od;
    printf(" new="); j = 0; do :: j < T -> printf("%d,", HAS(1, j)); j++ :: else -> break od;
    printf("\n")
}
#define TELL told_all()
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
           one has not come beyond the handover yet, it waits: then they are in the old one, or in the WAL */
        if
        :: i < wu ->
            y = (th <= i && u[1] > th -> 1 : 0); j = 0;
            do
            :: j <= i ->
                if
                :: !(com & B(j)) -> skip
                :: (com & B(j)) && u[y] > j && (y == 1 || j < th) -> if :: HAS(y, j) != 1 -> is_whole = false :: else fi
                :: else -> if :: j <= since -> is_whole = false :: else fi
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
    is_settled = !early;        /* and that was not read before: a table is read up to its WAL's upper */
    assert(is_once); assert(is_whole); assert(is_ended); assert(is_settled)
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
        do :: j < high -> if :: com & B(j) -> HAS(r, j)++ :: else fi; j++ :: else -> break od;
        if :: u[r] < high -> u[r] = high :: else fi
    :: else
    fi
}

/* SUBTLE: the promise and the WAL's upper are two guards: an applier has seen no more than the WAL's upper, and promises
   that before it appends. What is wrong with the promise breaks something only where handovers do not mind the WAL. */
#if defined(MUTANT_applies_without_a_promise) || defined(MUTANT_span_not_looked_at_again) || defined(MUTANT_handover_below_the_promise)
#define ONE_GUARD
#endif
#ifdef MUTANT_applies_without_a_promise
#define ASK(a) skip
#else
#define ASK(a) if :: promised < aw[a] -> promised = aw[a] :: else fi
#endif
#ifdef MUTANT_span_not_looked_at_again
#define SAME(a) true
#else
#define SAME(a) (ar[a] == 1 || th == ath[a] || th >= aend[a])
#endif
#define END(n) (th < (n) -> th : (n))

inline forget(a) { apc[a] = 0; aw[a] = 0; ath[a] = 0; ar[a] = 0; astart[a] = 0; aend[a] = 0 }
inline look(a, r) { aw[a] = wu; ath[a] = th; ar[a] = r; astart[a] = u[r]; aend[a] = (r == 0 && th < wu -> th : wu); apc[a] = 1 }

/* It looks: the WAL's upper, the renditions, and which piece of which one is missing. A table without commits that it
   lacks is left alone, unless it was handed over. */
#define APPLIER(a) \
:: d_step { apc[a] == 0 && u[0] < END(wu) && ((com >> u[0]) != 0 || th != NONE) -> \
    look(a, 0); STEP(applier, a, look_old, wu) } \
:: d_step { apc[a] == 0 && th != NONE && u[1] >= th && u[1] < wu && ((com >> u[1]) != 0 || u[1] == th) -> \
    look(a, 1); STEP(applier, a, look_new, wu) } \
/* the promise first; then the span may not have changed */ \
:: d_step { apc[a] == 1 -> ASK(a); apc[a] = 2; STEP(applier, a, promise, promised) } \
:: d_step { apc[a] == 2 && !SAME(a) -> forget(a); STEP(applier, a, look_again, 0) } \
:: d_step { apc[a] == 2 && SAME(a) -> add(ar[a], astart[a], aend[a]); forget(a); STEP(applier, a, append, 0) }

#if defined(MUTANT_handover_below_the_promise)
#define EARLIEST 1
#elif defined(ONE_GUARD) || defined(MUTANT_handover_below_the_wal)
#define EARLIEST promised
#else
#define EARLIEST (promised < wu -> wu : promised)
#endif
#ifdef ONE_GUARD
#define READ 0
#else
#define READ wu
#endif

/* A handover at a time that the controller was told, or at the earliest. That is written down first, and then decided. */
#define INTEND(t) \
:: d_step { hpc == 0 && th == NONE && hn < 2 && t < T && t >= EARLIEST -> hpc = 1; hn++; hat = t; STEP(controller, 0, intend, t) }
#define CONTROLLER \
:: d_step { hpc == 0 && th == NONE && hn < 2 -> hpc = 1; hn++; hat = NONE; STEP(controller, 0, intend, NONE) } \
INTEND(1) INTEND(2) INTEND(3) INTEND(4) INTEND(6) INTEND(8) \
:: d_step { hpc == 1 && hat < EARLIEST -> hpc = 0; hat = 0; STEP(controller, 0, refused, EARLIEST) } \
:: d_step { hpc == 1 && hat >= EARLIEST && (hat != NONE || EARLIEST < T) -> \
    th = (hat == NONE -> EARLIEST : hat); early = (th < READ); \
    rows = rows | B(th); if :: wu <= th -> wu = th + 1 :: else fi; \
    if :: promised <= th -> promised = th + 1 :: else fi; \
    hpc = 2; hat = 0; STEP(controller, 0, hand_over, th) }

#ifdef MUTANT_copied_as_far_as_promised
#define THERE promised
#else
#define THERE u[0]
#endif
/* The copy needs no handover: it may begin before, and ends at the time of it. What it copies is promised before. */
#define COPIER \
:: d_step { cpc == 0 && u[1] < END(THERE) -> \
    if :: promised < THERE -> promised = THERE :: else fi; \
    cend = END(THERE); cpc = 1; STEP(copier, 0, promise, promised) } \
:: d_step { cpc == 1 -> \
    j = u[1]; \
    do :: j < cend -> HAS(1, j) = HAS(1, j) + HAS(0, j); j++ :: else -> break od; \
    u[1] = cend; cpc = 0; x = cend; cend = 0; STEP(copier, 0, copy, x) }

/* m: those of the rows that were read with times in [low, high) that are commits */
#define READ_ROWS(low, high) (kr & com & (B(high) - 1) & ~(B(low) - 1))
#define LATEST(a, b) ((a) < (b) -> (b) : (a))

inline needed() { /* kx: the rows before it, of those that were read, are not needed any more */
    kx = kw;
#ifndef MUTANT_truncated_before_it_is_applied
    if
    :: kr != 0 ->
#ifdef MUTANT_truncation_forgets_the_old_rendition
        if :: th != NONE -> y = kx :: else -> y = u[0] fi;
#else
        y = u[0];
#endif
        x = END(kw);
        if :: y < x && READ_ROWS(y, x) != 0 && y < kx -> kx = y :: else fi;
        if :: th != NONE && y < th && th < kx -> kx = th :: else fi;
        if
        :: th != NONE ->
            y = LATEST(u[1], th);
            if :: y < kw && READ_ROWS(y, kw) != 0 && u[1] < kx -> kx = u[1] :: else fi;
            if :: u[1] <= th && th < kx -> kx = th :: else fi
        :: else
        fi
    :: else
    fi
#endif
}

#define DONE_ROWS (kr & (B(kx) - 1))
#define TRUNCATION \
:: d_step { kpc == 0 && kn < TRUNCATIONS && wu > 1 && since + 1 < wu -> \
    kn++; kw = wu; kr = rows; kpc = 1; STEP(truncation, 0, read_wal, wu) } \
:: d_step { kpc == 1 -> needed(); \
    if :: DONE_ROWS == 0 && since + 1 >= kx -> kpc = 0; kw = 0; kr = 0; kx = 0 :: else -> kpc = 2 fi; \
    STEP(truncation, 0, read_tables, kx) } \
:: d_step { kpc == 2 && DONE_ROWS != 0 && wu < T -> \
    rows = rows & ~DONE_ROWS; wu++; \
    kpc = 0; kw = 0; kr = 0; x = kx; kx = 0; STEP(truncation, 0, retract, x) } \
:: d_step { kpc == 2 && DONE_ROWS == 0 -> \
    since = kx - 1; \
    kpc = 0; kw = 0; kr = 0; kx = 0; STEP(truncation, 0, move, since) }

active proctype wal() {
    do
    :: atomic {
        if
        :: d_step { wu < T -> com = com | B(wu); rows = rows | B(wu); wu++; STEP(committer, 0, commit, wu) }
        APPLIER(0)
#if APPLIERS > 1
        APPLIER(1)
#endif
        CONTROLLER
        COPIER
        TRUNCATION
        fi;
        d_step { TELL; check() }
    }
    od
}
