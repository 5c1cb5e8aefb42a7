/* One shard: its log of states, its objects, and everybody who changes either.

   What is real behind each step (see docs/design/0225-formal-models.md, and replay.py, which carries out the steps):
     commit            shard.committer.carry_out: one compare-and-set on the head. A lost race changes nothing and starts
                       again from the newest state, so that a commit is one step here, on the newest state.
     writer            relation.registration, shard.batches (put), relation.commit, core.transitions._append
     unknown outcome   shard.committer.until_in_log: the same bytes again, until a row is at that seqno
     compactor         maintain.compaction (plan, tasks, commit), core.transitions._apply_compaction
     roller            maintain.worker.roll_up and write_rollup, core.transitions._add_rollup
     collector         maintain.garbage.collect, core.plan.garbage.plan_garbage
     auditor           maintain.garbage.audit_orphans, core.plan.garbage.plan_orphans
     expirer           maintain.garbage.expire, core.leases.retire: any lease may end at any moment
     reader            relation.reader, relation.reader_lease
     owner of a hold   shard.admin.downgrade_hold and release_hold, core.holds, core.leases.fold_since

   Bounds: times 0 to T-1, one append each; two writers, two compactors, one reader, one hold; ROLLS rollups; the numbers
   below say how often the others act. A process may stop between any two steps, for ever.
   What is not modelled: damage, sizes, schemas, runs and contents ahead, pins, pending areas, tombstones.

   Seqno 1 is the made shard. Times are numbers of appends; object k is bit k. Objects 1 to 4 are parts of appends,
   5 and 6 of compactions, 8 to 10 are rollups. Ids 0, 1 and 6, 7 are writers', 2 and 3 compactors', 4, 5 and 9 rollers', 8 the reader's. */

#ifndef T
#define T 2
#endif
#ifndef APPENDS     /* of each writer */
#define APPENDS 2
#endif
#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef DOUBTS      /* unknown outcomes in all */
#define DOUBTS 1
#endif
#ifndef COMPACTORS
#define COMPACTORS 1
#endif
#ifndef ROLLS
#define ROLLS 1
#endif
#ifndef COLLECTS
#define COLLECTS 1
#endif
#ifndef AUDITS
#define AUDITS 1
#endif
#ifndef EXPIRES
#define EXPIRES 1
#endif
#ifndef TAKES       /* snapshots of the reader; 0: there is no reader */
#define TAKES 1
#endif
#ifndef HOLD        /* 1: there is a named hold, at 0 */
#define HOLD 1
#endif
#ifndef RESTS       /* 1: also claim what is left once everybody is gone and upkeep has been done */
#define RESTS 0
#endif

#define B(n) (1 << (n))
#define KEYS 11
#define C1 5
#define R1 8
#define PARTS 127

/* --- the state that commits change */
byte seq = 1, upper = 0, since = 0;
byte tr[4];             /* by time: the object of the batch that has it */
short live = 0;         /* ids, as bits */
short ret = 0;          /* those that were retired, with the reader's, which is 8 */
byte gs[KEYS];          /* by object: the seqno at which it became garbage; 0: it is not */
byte ru1 = 0, ru2 = 0, rk1 = 0, rk2 = 0;    /* the newest two rollups: seqnos and objects */
bool rdlive = false; byte rdsince = 0, rdhold = 0;
bool held = HOLD; byte holds = 0;
/* --- the rest of the location */
short blob = 0;         /* objects, as bits */
byte lo = 1;            /* the oldest row of the log */
/* --- what is in objects: set when they are written */
byte kc[7], ks[7];      /* of parts: times, as bits; since */
byte rs[3], rr[3];      /* of rollups: seqno; the parts that the copied state refers to, as bits */
/* --- ghosts */
byte applied[7];        /* how often the rows of an append came into the trace */
byte said[7];           /* what its caller was told: 1 committed, 2 certainly not */
bool strange = false;   /* a rollup is a copy of what was never committed */

/* --- processes */
byte wpc[2], wn[2], wt[2], wk[2], wid[2], wseq[2];
bool win[2], wfly[2], wlost[2], wreg[2];
byte second = 0;        /* parts that writers put under their second id */
byte cpc[2], cn[2], cs[2], cseq[2], ctr[8];
bool cin[2], cfly[2];
byte rpc = 0, rn = 0, rseq = 0, rrefs = 0, rwill = 0;
byte gpc = 0, gn = 0, gb = 0; short gm = 0;
byte apc = 0, an = 0; short alive = 0, al = 0, ao = 0, arefs = 0, asw = 0;
byte en = 0, dpc = 0, dn = 0, das = 0, dver = 0, dup = 0, dtr[4];
byte doubts = 0;
bool rested = false;
hidden byte i, j, x, y;
hidden short m;
hidden byte is_present, is_exact, is_once, is_answered, opens, rebuilds, is_committed, is_readable, is_held, is_unlinked, is_swept;

inline refs_of_head() { /* m: the parts that the head refers to */
    m = 0; j = 0;
    do :: j < upper -> m = m | B(tr[j]); j++ :: else -> break od
}

inline seqno_since() { x = (rdlive -> rdhold : seq) }

inline fold() { /* core.leases.fold_since */
    y = 99;
#ifndef MUTANT_since_ignores_readers
    if :: rdlive -> y = rdsince :: else fi;
#endif
    if :: held && holds < y -> y = holds :: else fi;
    if :: y != 99 && y > since -> since = y :: else fi
}

inline commit() { seq++; if :: rwill == seq -> strange = true :: else fi }

inline retire(id) { live = live & ~B(id); ret = ret | B(id) }

inline forget_reader() { dpc = 6; das = 0; dver = 0; dup = 0; j = 0; do :: j < 4 -> dtr[j] = 0; j++ :: else -> break od }

inline check() {
    refs_of_head();
    is_present = ((m & ~blob) == 0);                       /* what the head refers to is there */
    is_exact = true; is_once = true; is_answered = true; is_unlinked = true; i = 0;
    do
    :: i < upper ->
        y = 0; j = 0;
        do :: j < upper -> if :: tr[j] == tr[i] -> y = y | B(j) :: else fi; j++ :: else -> break od;
        if :: kc[tr[i]] != y -> is_exact = false :: else fi;
        if :: gs[tr[i]] != 0 -> is_unlinked = false :: else fi;
        i++
    :: else -> break
    od;
    i = 1;
    do
    :: i < 5 ->
        if :: applied[i] > 1 -> is_once = false :: else fi;
        if :: (said[i] == 1 && applied[i] != 1) || (said[i] == 2 && applied[i] != 0) -> is_answered = false :: else fi;
        i++
    :: else -> break
    od;
    /* whoever opens the shard: the newest rollup is there, and the rows after it */
    opens = (ru1 == 0 -> lo == 1 : ((blob & B(rk1)) != 0 && lo <= ru1 + 1));
    is_committed = (!strange && (ru1 == 0 || (rr[rk1 - R1] & ~blob) == 0));
    /* every state that a reader may hold can be made again */
    seqno_since(); y = x; rebuilds = (lo == 1); i = 0;
    do
    :: i < 3 ->
        if :: (blob & B(R1 + i)) && rs[i] != 0 && rs[i] <= y && lo <= rs[i] + 1 -> rebuilds = true :: else fi;
        i++
    :: else -> break
    od;
    is_readable = true;
    if
    :: rdlive && dpc == 3 ->
        i = 0;
        do
        :: i < dup ->
            if :: !(blob & B(dtr[i])) || ks[dtr[i]] > das -> is_readable = false :: else fi;
            i++
        :: else -> break
        od
    :: else
    fi;
    is_held = ((!rdlive || since <= rdsince) && (!held || since <= holds));
    i = 0;
    do :: i < upper -> if :: ks[tr[i]] > since -> is_held = false :: else fi; i++ :: else -> break od;
    assert(is_once); assert(is_present); assert(is_exact); assert(is_answered); assert(is_unlinked); assert(opens); assert(rebuilds);
    assert(is_committed); assert(is_readable); assert(is_held)
}

#ifdef SHOW
#define G(n) gs[n]
inline told_all() {
    printf(" | seq=%d upper=%d since=%d trace=%d,%d,%d,%d live=%d retired=%d", seq, upper, since, tr[0], tr[1], tr[2],
        tr[3], live, ret);
    printf(" sinces=%d,%d,%d,%d", ks[tr[0]], ks[tr[1]], ks[tr[2]], ks[tr[3]]);
    printf(" garbage=%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d rollups=%d:%d,%d:%d", G(0), G(1), G(2), G(3), G(4), G(5), G(6), G(7),
        G(8), G(9), G(10), ru1, rk1, ru2, rk2);
    printf(" reader=%d:%d:%d hold=%d:%d blob=%d lo=%d\n", rdlive, rdsince, rdhold, held, holds, blob, lo)
}
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
#define TELL told_all()
#define PATIENT(done) (done)    /* in random traces some wait, so that others have something to do before */
#else
#define PATIENT(done) true
#define TELL skip
#define STEP(who, n, what, arg) skip
#endif

/* --- a writer ----------------------------------------------------------------------------------------------------- */

#define LIVE(id) ((live & B(id)) != 0)
#ifdef MUTANT_lease_does_not_fence
#define MAY(id) true
#else
#define MAY(id) LIVE(id)
#endif
#define WKEY(w) (1 + 2 * (w) + wn[w])

inline append(w) { commit(); tr[upper] = wk[w]; upper++; applied[wk[w]]++ }

inline told(w, what) { /* what is not needed any more is zero, so that equal states are one */
    said[wk[w]] = what; wn[w]++; wpc[w] = 0; wt[w] = 0; wk[w] = 0; wfly[w] = false; win[w] = false; wseq[w] = 0
}

#define WRITER(w) \
:: d_step { wpc[w] == 0 && wn[w] < APPENDS && upper < T && !(wlost[w] && wid[w] > 1) -> \
    wt[w] = upper; wk[w] = WKEY(w); \
    if :: wlost[w] -> wid[w] = 6 + w; wlost[w] = false; wreg[w] = false :: else fi; \
    wpc[w] = (wreg[w] -> 2 : 1); \
    STEP(writer, w, begin, wt[w]) } \
:: d_step { wpc[w] == 1 -> commit(); live = live | B(wid[w]); wreg[w] = true; wpc[w] = 2; STEP(writer, w, register, wid[w]) } \
:: d_step { wpc[w] == 2 -> blob = blob | B(wk[w]); kc[wk[w]] = B(wt[w]); wpc[w] = 3; \
    if :: wid[w] > 1 -> second = second | B(wk[w]) :: else fi; \
    STEP(writer, w, put, wk[w]) } \
:: d_step { wpc[w] == 3 && !MAY(wid[w]) -> y = wk[w]; told(w, 2); wlost[w] = true; STEP(writer, w, expired, y) } \
:: d_step { wpc[w] == 3 && MAY(wid[w]) && upper != wt[w] -> told(w, 2); STEP(writer, w, mismatch, upper) } \
:: d_step { wpc[w] == 3 && MAY(wid[w]) && upper == wt[w] -> append(w); told(w, 1); STEP(writer, w, append, seq) } \
:: d_step { wpc[w] == 3 && MAY(wid[w]) && upper == wt[w] && doubts < DOUBTS -> /* it happened, and no answer came */ \
    doubts++; append(w); win[w] = true; wseq[w] = seq; wpc[w] = 4; STEP(writer, w, append_unknown, seq) } \
:: d_step { wpc[w] == 3 && MAY(wid[w]) && upper == wt[w] && doubts < DOUBTS -> /* it did not, and no answer came */ \
    doubts++; win[w] = false; wseq[w] = seq + 1; wpc[w] = 4; STEP(writer, w, append_nothing, wseq[w]) } \
:: d_step { wpc[w] == 3 && MAY(wid[w]) && upper == wt[w] && doubts < DOUBTS -> /* it may still arrive */ \
    doubts++; win[w] = false; wfly[w] = true; wseq[w] = seq + 1; wpc[w] = 4; STEP(writer, w, append_late, wseq[w]) } \
:: d_step { wfly[w] && !win[w] && seq + 1 == wseq[w] -> wfly[w] = false; append(w); win[w] = true; STEP(writer, w, arrive, seq) } \
RESOLVE(w)

#ifdef MUTANT_retry_without_looking
/* after an unknown outcome it starts again from the newest state, and does not look for its own token */
#define RESOLVE(w) \
:: d_step { wpc[w] == 4 && upper < T -> wt[w] = upper; wpc[w] = 3; wseq[w] = 0; STEP(writer, w, again, upper) }
#else
#ifdef MUTANT_lost_when_refused
/* what is sent again and refused counts as lost */
#define OURS(w) false
#else
#define OURS(w) win[w]
#endif
#define RESOLVE(w) \
:: d_step { wpc[w] == 4 && OURS(w) -> y = wseq[w]; told(w, 1); STEP(writer, w, found, y) } \
:: d_step { wpc[w] == 4 && !win[w] && seq + 1 == wseq[w] -> append(w); y = wseq[w]; told(w, 1); STEP(writer, w, sent_again, y) } \
:: d_step { wpc[w] == 4 && !OURS(w) && seq >= wseq[w] -> \
    y = wseq[w]; win[w] = false; wfly[w] = false; wseq[w] = 0; wpc[w] = 3; \
    if /* the newest state was read for it, and that decides */ \
    :: !MAY(wid[w]) -> told(w, 2); wlost[w] = true; STEP(writer, w, not_found_expired, y) \
    :: MAY(wid[w]) && upper != wt[w] -> told(w, 2); STEP(writer, w, not_found_mismatch, y) \
    :: else -> STEP(writer, w, not_found, y) \
    fi }
#endif

/* --- a compactor: it merges all batches there are ----------------------------------------------------------------- */

#define CID(c) (2 + (c))
#define CKEY(c) (C1 + (c))

inline inputs(c) { /* m: the objects that it merges, as bits; x: whether they are all still in the trace, in their places */
    m = 0; x = 1; j = 0;
    do
    :: j < cn[c] -> m = m | B(ctr[4 * c + j]); if :: tr[j] != ctr[4 * c + j] -> x = 0 :: else fi; j++
    :: else -> break
    od;
#ifdef MUTANT_compaction_looks_at_nothing
    x = 1
#endif
}

inline replace(c) {
    commit(); j = 1;
    do :: j < 7 -> if :: (m & B(j)) != 0 -> gs[j] = seq :: else fi; j++ :: else -> break od;
#ifdef MUTANT_outputs_become_garbage_too
    gs[CKEY(c)] = seq;
#endif
    j = 0;
#ifdef MUTANT_compaction_takes_what_came_since
    do :: j < upper -> tr[j] = CKEY(c); j++ :: else -> break od
#else
    do :: j < cn[c] -> tr[j] = CKEY(c); j++ :: else -> break od
#endif
}

inline merge(c) { /* write the output: what the inputs hold, as of since */
    blob = blob | B(CKEY(c)); kc[CKEY(c)] = 0; ks[CKEY(c)] = cs[c]; j = 0;
    do :: j < cn[c] -> kc[CKEY(c)] = kc[CKEY(c)] | kc[ctr[4 * c + j]]; j++ :: else -> break od;
#ifdef MUTANT_inputs_deleted_before_the_row
    blob = blob & ~m;
#endif
}

inline rest_of(c) { /* it is over, but for its id */
    cpc[c] = 5; cn[c] = 0; cs[c] = 0; cseq[c] = 0; cin[c] = false; cfly[c] = false; j = 0;
    do :: j < 4 -> ctr[4 * c + j] = 0; j++ :: else -> break od
}

#define COMPACTOR(c) \
:: d_step { cpc[c] == 0 && upper > 1 && tr[0] != tr[upper - 1] -> \
    cn[c] = upper; cs[c] = since; j = 0; \
    do :: j < upper -> ctr[4 * c + j] = tr[j]; j++ :: else -> break od; \
    cpc[c] = 1; STEP(compactor, c, plan, cs[c]) } \
:: d_step { cpc[c] == 1 -> commit(); live = live | B(CID(c)); cpc[c] = 2; STEP(compactor, c, register, CID(c)) } \
:: d_step { cpc[c] == 2 -> inputs(c); \
    if \
    :: (m & ~blob) == 0 -> merge(c); cpc[c] = 3; STEP(compactor, c, put, CKEY(c)) \
    :: else -> is_present = !x; assert(is_present); rest_of(c); STEP(compactor, c, gone, 0) \
    fi } \
:: d_step { cpc[c] == 3 -> inputs(c); \
    if \
    :: !MAY(CID(c)) -> rest_of(c); STEP(compactor, c, expired, 0) \
    :: MAY(CID(c)) && !x -> rest_of(c); STEP(compactor, c, overtaken, 0) \
    :: else -> replace(c); rest_of(c); STEP(compactor, c, apply, seq) \
    fi } \
:: d_step { cpc[c] == 3 && MAY(CID(c)) && doubts < DOUBTS -> inputs(c); \
    if :: x -> doubts++; replace(c); cin[c] = true; cseq[c] = seq; cpc[c] = 4; STEP(compactor, c, apply_unknown, seq) :: else fi } \
:: d_step { cpc[c] == 3 && MAY(CID(c)) && doubts < DOUBTS -> inputs(c); \
    if :: x -> doubts++; cin[c] = false; cseq[c] = seq + 1; cpc[c] = 4; STEP(compactor, c, apply_nothing, cseq[c]) :: else fi } \
:: d_step { cpc[c] == 3 && MAY(CID(c)) && doubts < DOUBTS -> inputs(c); \
    if :: x -> doubts++; cfly[c] = true; cseq[c] = seq + 1; cpc[c] = 4; STEP(compactor, c, apply_late, cseq[c]) :: else fi } \
:: d_step { cfly[c] && !cin[c] && seq + 1 == cseq[c] -> inputs(c); cfly[c] = false; replace(c); cin[c] = true; STEP(compactor, c, arrive, seq) } \
CRESOLVE(c) \
:: d_step { cpc[c] == 5 && LIVE(CID(c)) -> commit(); retire(CID(c)); cpc[c] = 6; STEP(compactor, c, close, CID(c)) } \
:: d_step { cpc[c] == 5 && !LIVE(CID(c)) -> cpc[c] = 6; STEP(compactor, c, close_expired, CID(c)) }

#ifdef MUTANT_outputs_deleted_when_in_doubt
#define CRESOLVE(c) :: d_step { cpc[c] == 4 -> blob = blob & ~B(CKEY(c)); rest_of(c); STEP(compactor, c, clean, 0) }
#else
#define CRESOLVE(c) \
:: d_step { cpc[c] == 4 && !cin[c] && seq + 1 == cseq[c] -> inputs(c); replace(c); rest_of(c); STEP(compactor, c, sent_again, seq) } \
:: d_step { cpc[c] == 4 && cin[c] && cseq[c] >= lo -> y = cseq[c]; rest_of(c); STEP(compactor, c, found, y) } \
:: d_step { cpc[c] == 4 && !cin[c] && seq >= cseq[c] && cseq[c] >= lo -> y = cseq[c]; cfly[c] = false; cseq[c] = 0; cpc[c] = 3; inputs(c); \
    if \
    :: !MAY(CID(c)) -> rest_of(c); STEP(compactor, c, not_found_expired, y) \
    :: MAY(CID(c)) && !x -> rest_of(c); STEP(compactor, c, not_found_overtaken, y) \
    :: else -> STEP(compactor, c, not_found, y) \
    fi } \
:: d_step { cpc[c] == 4 && seq >= cseq[c] && cseq[c] < lo -> y = cseq[c]; rest_of(c); STEP(compactor, c, never_known, y) }
#endif

/* --- rollups ------------------------------------------------------------------------------------------------------ */

#define RID (rn < 2 -> 4 + rn : 9)
#define RKEY (R1 + rn)
#define ROLLER \
:: d_step { rpc == 0 && rn < ROLLS -> commit(); live = live | B(RID); rpc = 1; STEP(roller, rn, register, RID) } \
ROLLER_READS \
:: d_step { rpc == 2 -> blob = blob | B(RKEY); rs[rn] = rseq; rr[rn] = rrefs; rpc = 3; STEP(roller, rn, put, RKEY) } \
:: d_step { rpc == 3 && !MAY(RID) -> rpc = 4; rseq = 0; rrefs = 0; STEP(roller, rn, expired, 0) } \
:: d_step { rpc == 3 && MAY(RID) && rseq <= ru1 -> rpc = 4; y = rseq; rseq = 0; rrefs = 0; STEP(roller, rn, too_old, y) } \
:: d_step { rpc == 3 && MAY(RID) && rseq > ru1 && rseq <= seq -> \
    commit(); \
    if :: ru2 != 0 -> gs[rk2] = seq :: else fi; \
    ru2 = ru1; rk2 = rk1; ru1 = rseq; rk1 = RKEY; rpc = 4; rseq = 0; rrefs = 0; STEP(roller, rn, link, seq) } \
:: d_step { rpc == 4 && LIVE(RID) -> commit(); retire(RID); rpc = 0; STEP(roller, rn, close, RID); rn++ } \
:: d_step { rpc == 4 && !LIVE(RID) -> rpc = 0; STEP(roller, rn, close_expired, RID); rn++ }

#ifdef MUTANT_rollup_of_what_is_in_doubt
/* it copies the state that its own transition would have made, of which no answer came: at first nothing is there */
#define ROLLER_READS :: d_step { rpc == 1 -> rseq = seq + 1; rwill = rseq; refs_of_head(); rrefs = m; rpc = 2; STEP(roller, rn, read, rseq) }
#else
#define ROLLER_READS :: d_step { rpc == 1 -> rseq = seq; refs_of_head(); rrefs = m; rpc = 2; STEP(roller, rn, read, rseq) }
#endif

/* --- garbage ------------------------------------------------------------------------------------------------------ */

inline plan_garbage() {
    seqno_since();
    gm = 0; gb = 0; j = 1; y = x;
#ifdef MUTANT_collector_ignores_readers
    y = seq;
#endif
#ifdef MUTANT_truncation_ignores_readers
    x = seq;
#endif
    do
    :: j < KEYS ->
#ifdef MUTANT_collector_needs_no_rollup
        if :: gs[j] != 0 && gs[j] < y -> gm = gm | B(j) :: else fi;
#else
        if :: gs[j] != 0 && gs[j] < y && (j >= R1 || ru1 > gs[j]) -> gm = gm | B(j) :: else fi;
#endif
        j++
    :: else -> break
    od;
#ifdef MUTANT_truncated_past_the_rollup
    gb = x;
#else
    if :: ru1 != 0 && ru1 <= x -> gb = ru1 :: else -> if :: ru2 != 0 && ru2 <= x -> gb = ru2 :: else fi fi;
#endif
}

#define COLLECTOR \
:: d_step { gpc == 0 && gn < COLLECTS -> plan_garbage(); \
    if :: gm || gb > 1 -> gn++; gpc = (gm -> 1 : 3); STEP(collector, gn, plan, gm) :: else fi } \
:: d_step { gpc == 1 -> delete(gm); gpc = 2; STEP(collector, gn, delete, gm) } \
:: d_step { gpc == 2 -> \
    x = 0; j = 1; \
    do :: j < KEYS -> if :: (gm & B(j)) && gs[j] -> x = 1; gs[j] = 0 :: else fi; j++ :: else -> break od; \
    if :: x -> commit() :: else fi; \
    gm = 0; gpc = (gb > 1 -> 3 : 0); STEP(collector, gn, forget, seq) } \
:: d_step { gpc == 3 -> if :: gb > lo -> lo = gb :: else fi; gpc = 0; y = gb; gb = 0; STEP(collector, gn, truncate, y) }

/* --- orphans ------------------------------------------------------------------------------------------------------ */

inline delete(what) { /* nobody reads what is in deleted objects */
    blob = blob & ~(what); j = 1;
    do
    :: j < 7 -> if :: (what) & B(j) -> kc[j] = 0; ks[j] = 0 :: else fi; j++
    :: else -> break
    od
}

inline judge() { /* which of the listed objects no writer can ever link: by the ids `alive`, and what is referred to */
    ao = 0; asw = ret; j = 1;
    do
    :: j < KEYS ->
        if
        :: j < 7 -> x = (j < 5 -> (WRITERS == 1 -> 0 : (j - 1) / 2) : j - 3)
        :: else -> x = 99
        fi;
        if
        :: !(al & B(j)) || j == 7
        :: else ->
            if  /* a writer's part may be of its second id */
            :: x < 2 -> if :: second & B(j) -> x = x + 6 :: else fi
            :: else
            fi;
            if :: x < 8 -> asw = asw & ~B(x) :: else fi;
            if
            :: (arefs & B(j)) || gs[j]
            :: else ->
#ifdef MUTANT_parts_of_the_retired_are_left
                if :: j >= R1 && rs[j - R1] <= ru1 -> ao = ao | B(j) :: else fi
#else
#ifdef MUTANT_staged_objects_are_swept
                if :: (x < 8) || (j >= R1 && rs[j - R1] <= ru1) -> ao = ao | B(j) :: else fi
#else
                if :: (x < 8 && !(alive & B(x))) || (j >= R1 && rs[j - R1] <= ru1) -> ao = ao | B(j) :: else fi
#endif
#endif
            fi
        fi;
        j++
    :: else -> break
    od
}

inline all_refs() { refs_of_head(); arefs = m | (ru1 -> B(rk1) : 0) | (ru2 -> B(rk2) : 0) }

#ifdef MUTANT_audit_reads_before_it_lists
#define AUDITOR_LOOKS \
:: d_step { apc == 0 && an < AUDITS -> an++; alive = live; all_refs(); apc = 1; STEP(auditor, an, read_first, 0) } \
:: d_step { apc == 1 -> al = blob; judge(); apc = 2; STEP(auditor, an, list, ao) }
#else
#define AUDITOR_LOOKS \
:: d_step { apc == 0 && an < AUDITS && blob -> an++; al = blob; apc = 1; STEP(auditor, an, list, al) } \
:: d_step { apc == 1 -> alive = live; all_refs(); judge(); apc = (ao -> 2 : (asw -> 3 : 0)); al = 0; arefs = 0; alive = 0; STEP(auditor, an, read, ao) }
#endif
#define AUDITOR \
AUDITOR_LOOKS \
:: d_step { apc == 2 -> delete(ao); apc = (asw -> 3 : 0); al = ao; ao = 0; arefs = 0; STEP(auditor, an, delete, al); al = 0 } \
:: d_step { apc == 3 -> \
    if :: ret & asw -> commit(); ret = ret & ~asw :: else fi; \
    apc = 0; y = 0; m = asw; asw = 0; STEP(auditor, an, forget, m) }

/* --- leases ------------------------------------------------------------------------------------------------------- */

#define EXPIRE(id) :: d_step { en < EXPIRES && LIVE(id) -> en++; commit(); retire(id); STEP(expirer, 0, expire, id) }
#define EXPIRER \
EXPIRE(0) EXPIRE(1) EXPIRE(2) EXPIRE(3) EXPIRE(4) EXPIRE(5) EXPIRE(6) EXPIRE(7) EXPIRE(9) \
:: d_step { en < EXPIRES && rdlive -> en++; commit(); rdlive = false; rdsince = 0; rdhold = 0; ret = ret | B(8); STEP(expirer, 0, expire, 8) }

/* --- the reader: it reads as of the earliest time that it may ------------------------------------------------------ */

#define READER \
:: d_step { dpc == 0 && TAKES > 0 && dn == 0 -> \
    commit(); rdlive = true; rdsince = since; rdhold = seq; dver = seq; dpc = 2; STEP(reader, 0, open, rdsince) } \
:: d_step { dpc == 2 && dn < TAKES && !rdlive -> forget_reader(); STEP(reader, 0, take_expired, 0) } \
:: d_step { dpc == 2 && dn < TAKES && rdlive && upper > rdsince -> \
    dn++; das = rdsince; dver = seq; dup = upper; j = 0; \
    do :: j < upper -> dtr[j] = tr[j]; j++ :: else -> break od; \
    dpc = 3; STEP(reader, 0, take, das) } \
:: d_step { dpc == 3 -> \
    y = 0; x = 1; j = 0; /* y: the rows up to das; x: whether all of the objects that it needs are there */ \
    do \
    :: j < dup -> \
        if :: j <= das -> y = y | B(j); if :: !(blob & B(dtr[j])) -> x = 0 :: else fi :: else fi; \
        j++ \
    :: else -> break \
    od; \
    j = 0; \
    do :: j < 4 -> dtr[j] = 0; j++ :: else -> break od; \
    dup = 0; dpc = 4; \
    if :: x -> STEP(reader, 0, read, y) :: else -> forget_reader(); STEP(reader, 0, read_expired, 0) fi } \
:: d_step { dpc == 4 && rdlive -> /* it gives up the time that it has read */ \
    commit(); rdsince = das + 1; \
    if :: dver > rdhold -> rdhold = dver :: else fi; \
    fold(); dver = seq; dpc = 2; STEP(reader, 0, downgrade, rdsince) } \
:: d_step { dpc == 4 && !rdlive -> forget_reader(); STEP(reader, 0, downgrade_expired, 0) } \
:: d_step { dpc == 2 && rdlive && PATIENT(dn == TAKES) -> commit(); rdlive = false; ret = ret | B(8); rdsince = 0; rdhold = 0; forget_reader(); STEP(reader, 0, close, 0) } \

/* --- the owner of the hold ---------------------------------------------------------------------------------------- */

#define OWNER \
:: d_step { held && holds + 1 < upper -> commit(); holds++; fold(); STEP(owner, 0, move, holds) } \
:: d_step { held && PATIENT(upper == T) -> commit(); held = false; holds = 0; RELEASE; STEP(owner, 0, release, 0) }
#ifdef MUTANT_release_gives_up_history
#define RELEASE if :: upper > 0 && since < upper - 1 -> since = upper - 1 :: else fi
#else
#define RELEASE skip
#endif

/* --- at rest: everybody is gone, leases have ended, upkeep is done until nothing is left to do ----------------------- */

inline rest() {
    ret = ret | live; live = 0; rdlive = false; seq = seq + 3; /* Expire, a roller comes, its rollup (and goes) */
    if :: ru2 -> gs[rk2] = seq :: else fi;
    if
    :: ru1 != 0 && rn == 3 -> ru2 = 0; rk2 = 0
    :: else -> ru2 = ru1; rk2 = rk1; ru1 = seq - 1; rk1 = R1 + 2; blob = blob | B(R1 + 2); rs[2] = seq - 1
    fi;
    seq++;
    plan_garbage(); blob = blob & ~gm; j = 1;
    do :: j < KEYS -> if :: gm & B(j) -> gs[j] = 0 :: else fi; j++ :: else -> break od;
    al = blob; alive = 0; all_refs(); judge(); blob = blob & ~ao;
    all_refs(); is_swept = (blob == arefs);
    assert(is_swept)
}

active proctype shard() {
    wid[1] = 1;
    do
    :: atomic {
    if
#if WRITERS > 0
    WRITER(0)
#endif
#if WRITERS > 1
    WRITER(1)
#endif
#if COMPACTORS > 0
    COMPACTOR(0)
#endif
#if COMPACTORS > 1
    COMPACTOR(1)
#endif
    ROLLER
    COLLECTOR
    AUDITOR
    EXPIRER
    READER
    OWNER
    fi;
    d_step { TELL; check() }
    }
#if RESTS
    :: d_step { !rested -> rested = true; rest() } -> break
#endif
    od
}
