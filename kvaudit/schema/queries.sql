-- Questions that people ask of a kvaudit run, for DuckDB. Start it inside the run folder:
--
--     cd runs/prices
--     duckdb < queries.sql                     all of them
--     duckdb -c "from 'summary.parquet'"       one of your own
--
-- `kvaudit schema` says what every table and column holds. An answer is damaged when it differs from full prefill's.


-- name: fidelity
-- How many answers equal full prefill's, under each policy, order and control?
select
    arm.policy,
    arm."order",
    arm.control,
    count(*) as requests,
    count(*) filter (compared.equal) as equal,
    avg(compared.equal::int) as fidelity
from 'comparisons.parquet' as compared
join (select distinct arm_id, policy, "order", control from 'observations/*.parquet') as arm
    on arm.arm_id = compared."right"
where compared.kind = 'reference'
group by all
order by arm.policy, arm.control, fidelity, arm."order";


-- name: flipping-requests
-- Which requests get another answer when only the order changes, and in how many pairs of orders?
select
    policy,
    request_id,
    count(*) filter (not equal) as differing_pairs,
    count(*) as compared_pairs,
    avg((not equal)::int) as variation
from 'comparisons.parquet'
where kind = 'orders'
group by all
having differing_pairs > 0
order by policy, variation desc, request_id;


-- name: answers-of-one-request
-- What did one request answer in every arm, side by side with full prefill? It is the one with most differing pairs;
-- for another, write: with chosen as (select 'ID' as request_id)
with chosen as (
    select request_id
    from 'comparisons.parquet'
    where kind = 'orders'
    group by request_id
    order by count(*) filter (not equal) desc, request_id
    limit 1
)
select
    served.request_id,
    served.policy,
    served."order",
    served.control,
    served.position,
    served.answer_text as answer,
    full_prefill.answer_text as full_prefill,
    compared.equal,
    served.first_difference
from 'observations/*.parquet' as served
join chosen on chosen.request_id = served.request_id
join 'comparisons.parquet' as compared
    on compared.kind = 'reference' and compared."right" = served.arm_id and compared.request_id = served.request_id
join 'observations/*.parquet' as full_prefill
    on full_prefill.arm_id = compared."left" and full_prefill.request_id = served.request_id
order by served.policy, served.control, served.position, served."order";


-- name: history-or-own-error
-- How much of the damage is history, and how much does the policy do by itself with the cache emptied before each
-- request? A request counts as damaged by history when it is right under the reset control and wrong in some order.
with judged as (
    select
        arm.policy,
        compared.request_id,
        bool_or(not compared.equal) filter (arm.control = 'none') as wrong_in_an_order,
        bool_or(not compared.equal) filter (arm.control = 'reset') as wrong_under_reset
    from 'comparisons.parquet' as compared
    join (select distinct arm_id, policy, control from 'observations/*.parquet') as arm
        on arm.arm_id = compared."right"
    where compared.kind = 'reference'
    group by all
)
select
    policy,
    count(*) as requests,
    count(*) filter (wrong_in_an_order and not wrong_under_reset) as damaged_by_history,
    count(*) filter (wrong_under_reset) as damaged_by_itself
from judged
where wrong_in_an_order is not null and wrong_under_reset is not null
group by policy
order by policy;


-- name: controls
-- Do full prefill, the repeat and the rounding controls reproduce their answers? If not, run-to-run variation, or
-- rounding, looks like history.
select
    kind,
    policy,
    count(*) as requests,
    count(*) filter (not equal) as differing
from 'comparisons.parquet'
where kind in ('noise', 'repeat', 'rounding')
group by all
order by kind, policy;


-- name: writers-behind-damage
-- Who wrote the cached segments that a damaged request reused, where did they stand, and was the text before them the
-- same? `entries_behind` counts the cached entries that the writer itself had computed them over.
select
    damaged.policy,
    origin.arm_id,
    origin.request_id,
    origin.segment,
    origin.content_id,
    origin.writer_request_id,
    origin.writer_part,
    origin.old_position,
    origin.new_position,
    origin.context_hash_written = origin.context_hash_now as same_context,
    written.tokens,
    len(written.computed_over) as entries_behind
from 'comparisons.parquet' as damaged
join 'provenance/*.parquet' as origin
    on origin.arm_id = damaged."right" and origin.request_id = damaged.request_id
join 'writes/*.parquet' as written
    on written.arm_id = origin.arm_id
    and written.request_id = origin.writer_request_id
    and written.part = origin.writer_part
    and written.write_ordinal = origin.write_ordinal
where damaged.kind = 'reference' and not damaged.equal
order by damaged.policy, origin.arm_id, origin.request_id, origin.segment;


-- name: most-damaging-writers
-- Which earlier requests wrote the entries that damaged answers were made of? One whose rate stands out is a suspect: an
-- answer has many writers, so that a count alone accuses nobody. What a request's own prelude wrote is left out.
with reused as (
    select distinct arm_id, request_id, writer_request_id from 'provenance/*.parquet'
)
select
    compared.policy,
    reused.writer_request_id,
    count(*) filter (not compared.equal) as damaged_answers,
    count(*) as answers,
    avg((not compared.equal)::int) as damage_rate
from reused
join (select distinct arm_id, control from 'observations/*.parquet') as arm on arm.arm_id = reused.arm_id
join 'comparisons.parquet' as compared
    on compared.kind = 'reference' and compared."right" = reused.arm_id and compared.request_id = reused.request_id
where arm.control = 'none' and reused.writer_request_id <> reused.request_id
group by all
having damaged_answers > 0
order by compared.policy, damaged_answers desc, damage_rate desc, reused.writer_request_id;


-- name: chain-of-contamination
-- Which cache entries, through which earlier ones, went into one damaged answer? `steps` is 0 for an entry that the
-- answer reused, 1 for one that such an entry was computed over, and so on, 16 at most. The answer is the damaged one
-- with most entries a step behind; for another, write:
-- with recursive chosen as (select 'ARM' as arm_id, 'ID' as request_id)
-- Not for arms of the reset control, where writes are numbered anew for every request.
with recursive chosen as (
    select origin.arm_id, origin.request_id
    from 'comparisons.parquet' as damaged
    join (select distinct arm_id, control from 'observations/*.parquet') as arm on arm.arm_id = damaged."right"
    join 'provenance/*.parquet' as origin
        on origin.arm_id = damaged."right" and origin.request_id = damaged.request_id
    join 'writes/*.parquet' as written
        on written.arm_id = origin.arm_id and written.write_ordinal = origin.write_ordinal
    where damaged.kind = 'reference' and not damaged.equal and arm.control = 'none'
    group by all
    order by sum(len(written.computed_over)) desc, origin.arm_id, origin.request_id
    limit 1
),
chain as (
    select chosen.arm_id, chosen.request_id, origin.write_ordinal, 0 as steps
    from chosen
    join 'provenance/*.parquet' as origin
        on origin.arm_id = chosen.arm_id and origin.request_id = chosen.request_id
    union
    select chain.arm_id, chain.request_id, unnest(written.computed_over), chain.steps + 1
    from chain
    join 'writes/*.parquet' as written
        on written.arm_id = chain.arm_id and written.write_ordinal = chain.write_ordinal
    where chain.steps < 16
)
select
    chain.arm_id,
    chain.request_id,
    min(chain.steps) as steps,
    chain.write_ordinal,
    written.request_id as writer_request_id,
    written.part as writer_part,
    written.content_id,
    written.position
from chain
join 'writes/*.parquet' as written
    on written.arm_id = chain.arm_id and written.write_ordinal = chain.write_ordinal
group by all
order by steps, chain.write_ordinal;


-- name: reuse-by-position
-- Does reuse, or damage, grow along an arm, as history does? In tenths of the arm, 1 is its beginning.
with placed as (
    select *, 1 + (10 * position) // (1 + max(position) over (partition by arm_id)) as tenth
    from 'observations/*.parquet'
    where control = 'none' and policy <> 'full-prefill'
)
select
    placed.policy,
    placed.tenth,
    count(*) as answers,
    sum(placed.reused_tokens) / sum(placed.prompt_tokens) as reuse_share,
    avg(compared.equal::int) as fidelity
from placed
join 'comparisons.parquet' as compared
    on compared.kind = 'reference' and compared."right" = placed.arm_id and compared.request_id = placed.request_id
group by all
order by placed.policy, placed.tenth;


-- name: ttft-speedup
-- How much sooner does the first token come than with full prefill? The median over requests of each request's median
-- ratio over the orders; each arm's first request is warm-up and left out. Equals `ttft_speedup` in the summary.
with full_prefill as (
    select request_id, ttft_ms
    from 'observations/*.parquet'
    where policy = 'full-prefill' and control = 'none' and position > 0
),
ratios as (
    select served.policy, served.request_id, median(full_prefill.ttft_ms / served.ttft_ms) as ratio
    from 'observations/*.parquet' as served
    join full_prefill on full_prefill.request_id = served.request_id
    where served.control = 'none' and served.position > 0 and served.ttft_ms > 0
    group by all
)
select policy, count(ratio) as requests, median(ratio) as speedup
from ratios
group by policy
having requests > 0
order by policy;


-- name: evictions-before-damage
-- Was the cache short of room before an answer was damaged? `own_evictions` counts evictions of this request's own
-- segments, by requests that were served before it in the same arm.
with room as (
    select arm_id, request_id, count(*) as evicted from 'evictions/*.parquet' group by all
),
served as (
    select
        observed.arm_id,
        observed.policy,
        observed."order",
        observed.request_id,
        observed.position,
        coalesce(sum(room.evicted) over (
            partition by observed.arm_id order by observed.position
            rows between unbounded preceding and 1 preceding
        ), 0)::bigint as evictions_before
    from 'observations/*.parquet' as observed
    left join room on room.arm_id = observed.arm_id and room.request_id = observed.request_id
    where observed.control = 'none' and observed.policy <> 'full-prefill'
),
damaged as (
    select served.*
    from served
    join 'comparisons.parquet' as compared
        on compared.kind = 'reference' and compared."right" = served.arm_id and compared.request_id = served.request_id
    where not compared.equal
),
parts as (
    select distinct request_id, unnest(segments).content_id as content_id from 'requests.parquet'
),
own as (
    select damaged.arm_id, damaged.request_id, count(*) as own_evictions
    from damaged
    join parts on parts.request_id = damaged.request_id
    join 'evictions/*.parquet' as evicted
        on evicted.arm_id = damaged.arm_id and evicted.content_id = parts.content_id
    join served as evictor on evictor.arm_id = evicted.arm_id and evictor.request_id = evicted.request_id
    where evictor.position < damaged.position
    group by all
)
select
    damaged.policy,
    damaged."order",
    damaged.request_id,
    damaged.position,
    damaged.evictions_before,
    coalesce(own.own_evictions, 0) as own_evictions
from damaged
left join own on own.arm_id = damaged.arm_id and own.request_id = damaged.request_id
order by damaged.policy, damaged."order", damaged.position;


-- name: margins-of-flips
-- Near tie or damage? For every damaged answer of a request that flips between orders: how much likelier the engine
-- found the token at the first difference than its runner-up. Odds near 1 are a tie that numerics alone can turn.
with flipping as (
    select distinct policy, request_id from 'comparisons.parquet' where kind = 'orders' and not equal
)
select
    served.policy,
    served."order",
    served.request_id,
    served.first_difference,
    served.margin,
    exp(least(served.margin, 700)) as odds,
    compared.edit_distance
from 'observations/*.parquet' as served
join flipping on flipping.policy = served.policy and flipping.request_id = served.request_id
join 'comparisons.parquet' as compared
    on compared.kind = 'reference' and compared."right" = served.arm_id and compared.request_id = served.request_id
where served.control = 'none' and not compared.equal
order by served.policy, served.margin, served.request_id, served."order";


-- name: selections-against-fidelity
-- Does recomputing in fewer pieces, or capturing more of the deviation, go with better answers?
with selected as (
    select
        arm_id,
        request_id,
        len(spans) as fragments,
        coalesce(list_sum([span.deviation for span in spans]), 0) / nullif(total_deviation, 0) as captured
    from 'selections/*.parquet'
)
select
    arm.policy,
    arm."order",
    arm.control,
    median(selected.fragments) as fragmentation,
    median(selected.captured) as captured_deviation,
    avg(compared.equal::int) as fidelity,
    count(*) as requests
from 'comparisons.parquet' as compared
join (select distinct arm_id, policy, "order", control from 'observations/*.parquet') as arm
    on arm.arm_id = compared."right"
left join selected on selected.arm_id = compared."right" and selected.request_id = compared.request_id
where compared.kind = 'reference'
group by all
order by arm.policy, arm.control, arm."order";


-- name: damage-short-of-a-flip
-- How far is each arm from full prefill where the answer does not show it? KL divergence in nats a token.
select
    policy,
    "order",
    control,
    avg(kl) filter (isfinite(kl)) as kl_mean,
    median(kl) filter (isfinite(kl)) as kl_median,
    max(kl) filter (isfinite(kl)) as kl_largest,
    avg(reference_logprob) filter (isfinite(reference_logprob)) as reference_logprob_mean,
    count(*) filter (isfinite(kl)) as requests
from 'observations/*.parquet'
where policy <> 'full-prefill' and control not in ('repeat', 'rounding')
group by all
having requests > 0
order by policy, control, "order";


-- name: significant-differences
-- Which differences hold after Holm's adjustment at 5 %? `value` is first minus second; `discordant_left` requests were
-- right only in the first.
select metric, policy, "order", control, value, low, high, n, discordant_left, discordant_right, p_value, p_adjusted
from 'summary.parquet'
where p_adjusted < 0.05
order by p_adjusted, metric, policy, "order";
