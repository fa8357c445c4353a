-- One verb for many: what cancel.lua, reschedule.lua and revive.lua do for an id, for a batch of ids or of entries.
-- keys: due leased dead entries calls calls_old released released_old released_new counts
-- args: now call verb by when patient wake items...
-- include: clock entries byid once released recall wake counts move revive
-- verb: cancel | reschedule | replay | discard. by: id (every entry of it) | entry (that one alone). when: as in move.lua.
-- patient: '1' to be answered '' while the list of recent releases is long: each call shortens it, and searching it for
-- every id would stall Redis.
-- Returns a letter an item, of as many from the front as were done (a batch ends early when its records pass 1 MiB):
-- d done | f in flight | r released | n not found.
local before = answered()
if before then return before end
-- A key of another type must show itself before the first write.
redis.call('ZCARD', due)
redis.call('ZCARD', leased)
redis.call('ZCARD', dead)
redis.call('HLEN', entries)
redis.call('SCARD', released)
redis.call('SCARD', released_old)
local by_id = by == 'id'
local wanted = (verb == 'cancel' or verb == 'reschedule') and 'waiting' or 'dead'
if by_id and wanted == 'waiting' and redis.call('LLEN', released_new) > 0 then
  remember(redis.call('LPOP', released_new, 500))
  if patient == '1' and redis.call('LLEN', released_new) > 0 then return '' end
end
local at = clock()
local due_at = due_at_of(when, at)
local _, head = head_of(due)
-- Only what the verb needs to know: a call an entry is most of the time this takes.
local looks = verb == 'reschedule' or verb == 'replay'
local function entry_of(entry)
  local key, field = wanted == 'waiting' and due or dead, field_of(entry)
  if redis.call('ZSCORE', key, entry) then
    local record = looks and redis.call('HGET', entries, field) or ''
    return { { entry = entry, field = field, record = record, state = wanted } }
  end
  if wanted == 'waiting' and redis.call('ZSCORE', leased, entry) then return { { record = '', state = 'leased' } } end
  return {}
end
local said, mine, ids, bytes = {}, {}, {}, 0
for i = items_at, #ARGV do
  if bytes >= 1048576 then break end
  local item, count, leases, letter = ARGV[i], #mine, 0, 'n'
  for _, one in ipairs(by_id and entries_of(item) or entry_of(item)) do
    bytes = bytes + #one.record
    if one.state == wanted then mine[#mine + 1] = one end
    if one.state == 'leased' and wanted == 'waiting' then leases = leases + 1 end
  end
  if #mine > count then
    letter = 'd'
    ids[#ids + 1] = item
  elseif by_id and leases == 0 and wanted == 'waiting' and was_released(item) then
    letter = 'r'
  end
  if leases > 0 then letter = 'f' end
  said[#said + 1] = letter
end
local changed = #mine
if changed > 0 and verb == 'cancel' then
  local gone = {}
  for i, one in ipairs(mine) do gone[i] = one.entry end
  for from = 1, #gone, 1000 do
    redis.call('ZREM', due, unpack(gone, from, math.min(from + 999, #gone)))
  end
  forget(gone)
  if by_id then
    redis.call('SREM', released, unpack(ids))
    redis.call('SREM', released_old, unpack(ids))
    if redis.call('LLEN', released_new) > 0 then
      for _, id in ipairs(ids) do redis.call('LREM', released_new, 0, id) end
    end
  end
elseif changed > 0 and verb == 'reschedule' then
  move_all(mine, due_at)
elseif changed > 0 then
  revive_all(mine, verb, at)
end
local reply = table.concat(said)
if changed == 0 then return reply end
local COUNTED = { cancel = 'cancelled', reschedule = 'rescheduled', replay = 'replayed', discard = 'discarded' }
count_up(COUNTED[verb], changed)
if verb == 'reschedule' then wake_if_earlier(due_at, head) end
if verb == 'replay' then wake_if_earlier(at, head) end
return answer(reply, at)
