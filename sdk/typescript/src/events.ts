/** What happens to sandboxes and snapshots, read from a stream of Server-Sent Events. */
import { CapacityError, TransportError } from "./errors.js";
import { type CallOptions, checked, type Http, lines } from "./http.js";
import { pause } from "./retries.js";
import { checkOptions, type Info } from "./wire.js";

/** How long a daemon may send nothing before it is taken for gone: it says something every 15 s. */
const SILENCE_S = 60;

/** How long after a connection broke the next is made; doubled each time. */
const PAUSE_S_MIN = 0.1;
const PAUSE_S_MAX = 5;

/** Which events are told. */
export interface EventOptions extends CallOptions {
  /** Id of the last event that you know; 0 for all that are kept, undefined for new ones. */
  after?: number;
  /** Go on for ever (the default); or end after what there is. */
  follow?: boolean;
  /** Whether to connect again after a connection that was made once breaks (the default). */
  reconnect?: boolean;
}

const EVENT_OPTIONS: Record<keyof EventOptions, true> = {
  after: true,
  follow: true,
  reconnect: true,
  signal: true,
};

/** How far a client has come. */
interface Place {
  /** The last id that the daemon named. */
  after: number | undefined;
  /** How long to wait before the next connection. */
  pauseS: number;
  /** Whether there was one. */
  connected: boolean;
}

/** Yield events, over as many connections as it takes; `Client.events` documents it. */
export async function* followed(
  http: Http,
  options: EventOptions,
): AsyncGenerator<Info<"EventInfo">, void, void> {
  checkOptions("events", options, EVENT_OPTIONS);
  const { follow = true, reconnect = true, signal } = options;
  const place: Place = { after: options.after, pauseS: PAUSE_S_MIN, connected: false };
  for (;;) {
    try {
      yield* ofOneConnection(http, place, follow, signal);
      if (!(follow && reconnect)) return;
    } catch (error) {
      const isPassing = error instanceof TransportError || error instanceof CapacityError;
      if (!(isPassing && place.connected && reconnect)) throw error;
    }
    await pause(place.pauseS, signal);
    place.pauseS = Math.min(2 * place.pauseS, PAUSE_S_MAX);
  }
}

async function* ofOneConnection(
  http: Http,
  place: Place,
  follow: boolean,
  signal: AbortSignal | undefined,
): AsyncGenerator<Info<"EventInfo">, void, void> {
  const query = { after: place.after, follow };
  const answer = await http.streamed("/v2/events", { query, timeoutS: SILENCE_S, signal });
  try {
    let said: Record<string, string> = {};
    for await (const line of lines(answer)) {
      if (line === "") {
        note(place, said);
        if (said.data !== undefined) yield parsed(said.data);
        said = {};
        continue;
      }
      const colon = line.indexOf(": ");
      if (colon > 0) said[line.slice(0, colon)] = line.slice(colon + 2);
    }
  } finally {
    answer.discard();
  }
}

/** Note that the daemon has said something, and up to where that is. */
function note(place: Place, said: Record<string, string>): void {
  const id = said.id ?? "";
  if (!/^\d+$/.test(id)) {
    throw new TransportError(`this is no stream of events of ours: ${JSON.stringify(said)}`);
  }
  Object.assign(place, { after: Number(id), pauseS: PAUSE_S_MIN, connected: true });
}

function parsed(data: string): Info<"EventInfo"> {
  let event: unknown;
  try {
    event = JSON.parse(data);
  } catch {
    throw new TransportError(`an event makes no sense to us: ${data.slice(0, 200)}`);
  }
  return checked("EventInfo", event);
}
