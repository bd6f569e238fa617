//! The conversation that gives a guest its identity.
//!
//! The VMM sends `post_fork` to the agent and compares the wall clock that the
//! agent reports with the host's: a request that took long on a busy host set a
//! time that was already old (ADR 0005).  A forked machine does so before it opens
//! `vsock.sock`; one that runs when it is asked to `identify`.
//! `protocol/guest/PROTOCOL.md` says what the agent does.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use forkd_proto::control::{Child, ChildNetwork, Identify, Reset};
use forkd_proto::frame::{self, Decoder, Kind};
use forkd_proto::guest::{AdjustTime, DiskLimit, Event, PostFork, Request, Seed};
use forkd_proto::limits::SEED_BYTES;
use serde::Deserialize;

use crate::error::Error;
use crate::sys::clock::realtime_ns;
use crate::sys::process;

/// A guest's clock may be this far off the host's, in nanoseconds, before it is corrected.
const CLOCK_TOLERANCE_NS: u64 = 20_000_000;
/// How often the clock is corrected before the fork fails.
///
/// A guest that loses its processor between reading its clock and sending it seems to be late, and
/// a correction by that makes it early.  With a thousand machines starting on one processor two of
/// five readings are such; eight corrections in a row were seen to be, 64 never will.
const CLOCK_TRIES_MAX: u32 = 64;
/// Longest part of an agent's refusal that is passed on, in bytes, so that it fits any frame.
const REFUSAL_BYTES_MAX: usize = 8 << 10;

/// What a guest is told of itself.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    id: &'a str,
    hostname: &'a str,
    machine_id: &'a str,
    boot_id: &'a str,
    network: Option<&'a ChildNetwork>,
    memory_bytes: Option<u64>,
}

impl<'a> Identity<'a> {
    /// The sandbox's id.
    #[must_use]
    pub fn id(&self) -> &str {
        self.id
    }

    /// The same for a guest with so much memory: it need not be told of a limit beyond that.
    #[must_use]
    pub fn within(self, memory_bytes: u64) -> Self {
        Self { memory_bytes: self.memory_bytes.filter(|limit| *limit < memory_bytes), ..self }
    }

    /// That of sandbox `id` after a reset.
    #[must_use]
    pub fn after_reset(id: &'a str, reset: &'a Reset) -> Self {
        let Reset { hostname, machine_id, boot_id, network, .. } = reset;
        let (network, memory_bytes) = (network.as_ref(), reset.guest_memory_bytes);
        Self { id, hostname, machine_id, boot_id, network, memory_bytes }
    }
}

impl<'a> From<&'a Child> for Identity<'a> {
    fn from(child: &'a Child) -> Self {
        let Child { id, hostname, machine_id, boot_id, network, .. } = child;
        let (network, memory_bytes) = (network.as_ref(), child.guest_memory_bytes);
        Self { id, hostname, machine_id, boot_id, network, memory_bytes }
    }
}

impl<'a> From<&'a Identify> for Identity<'a> {
    fn from(identify: &'a Identify) -> Self {
        let Identify { id, hostname, machine_id, boot_id, network, .. } = identify;
        let (network, memory_bytes) = (network.as_ref(), identify.guest_memory_bytes);
        Self { id, hostname, machine_id, boot_id, network, memory_bytes }
    }
}

/// A conversation under way.
#[derive(Debug)]
pub struct Handshake {
    stream: UnixStream,
    decoder: Decoder,
    tries: u32,
    /// What was sent, if an agent may be too old to know all of it.
    said: Option<Box<PostFork>>,
    ipv6: bool,
    generation: Generation,
}

/// Whether the guest's kernel is to be told that its generation id has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Generation {
    /// The agent has not said.
    Unknown,
    /// It is.
    Wanted,
    /// It was told, or need not be.
    Done,
}

/// What the handshake needs of an answer: those to `adjust_time` say the time alone.
#[derive(Deserialize)]
struct Answer {
    realtime_ns: i64,
    #[serde(default)]
    ipv6: bool,
    #[serde(default)]
    generation_on_request: bool,
}

#[derive(Deserialize)]
struct Refusal {
    code: String,
    message: String,
    #[serde(default)]
    field: Option<String>,
}

impl Refusal {
    /// The request without what an agent has refused that knows less; `None` if it must know that.
    fn shorter(&self, said: &PostFork) -> Option<PostFork> {
        let field = self.field.as_deref().filter(|_| self.code == "invalid_request")?;
        let mut shorter = said.clone();
        match field {
            "network" => {
                let network = said.network.as_ref().filter(|one| one.address_v6.is_some())?;
                shorter.network = Some(network.without_v6());
            }
            "disk" => drop(shorter.disk.take()?),
            "memory_bytes" => drop(shorter.memory_bytes.take()?),
            _ => return None,
        }
        Some(shorter)
    }

    fn words(&self) -> String {
        let cut = |text: &str| text[..text.floor_char_boundary(REFUSAL_BYTES_MAX)].to_owned();
        format!("{} ({})", cut(&self.message), cut(&self.code))
    }
}

impl Handshake {
    /// Sends `post_fork` over `stream`, a fresh connection to the agent's port.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the host has no entropy or the stream is closed.
    pub fn start(
        stream: UnixStream,
        identity: Identity<'_>,
        disk: Option<DiskLimit>,
    ) -> Result<Self, Error> {
        let mut seed = [0; SEED_BYTES];
        process::random(&mut seed).map_err(Error::io("draw a seed"))?;
        let network = identity.network.map(ChildNetwork::guest);
        let post_fork = PostFork {
            sandbox_id: identity.id.to_owned(),
            hostname: identity.hostname.to_owned(),
            machine_id: identity.machine_id.to_owned(),
            boot_id: identity.boot_id.to_owned(),
            seed: Seed(seed),
            realtime_ns: realtime_ns(),
            network,
            disk,
            memory_bytes: identity.memory_bytes,
        };
        let has_v6 = post_fork.network.as_ref().is_some_and(|one| one.address_v6.is_some());
        let is_new = has_v6 || disk.is_some() || identity.memory_bytes.is_some();
        let said = is_new.then(|| Box::new(post_fork.clone()));
        let decoder = Decoder::new();
        let generation = Generation::Unknown;
        let mut handshake = Self { stream, decoder, tries: 0, said, ipv6: false, generation };
        handshake.send(&Request::PostFork(Box::new(post_fork)))?;
        let configured = handshake.stream.set_nonblocking(true);
        configured.map_err(Error::io("configure the handshake"))?;
        Ok(handshake)
    }

    /// The stream, to be watched for input.
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Whether the guest has said that it has the IPv6 address that it was given, or will.
    #[must_use]
    pub fn has_ipv6(&self) -> bool {
        self.ipv6
    }

    /// Whether the guest's kernel is to be told now that its generation id has changed: the agent
    /// has asked for it, or is one of before, which could not.  Says so once.
    pub fn take_announcement(&mut self) -> bool {
        let wanted = self.generation == Generation::Wanted;
        if wanted {
            self.generation = Generation::Done;
        }
        wanted
    }

    /// The stream is ready.  Returns whether the guest is.
    ///
    /// `received_ns` is the wall clock at which the answer left the guest: taken by the vCPU thread
    /// that brought it, so that a wait for this thread does not count as an error of the clock.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] with the agent's words if it refused, closed the stream, or could not be
    /// given the right time.
    pub fn advance(&mut self, received_ns: i64) -> Result<bool, Error> {
        let mut buffer = [0; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Error::Guest("the agent closed the connection".into())),
                Ok(read) => self.decoder.push(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(Error::Guest(format!("connection to the agent: {error}")));
                }
            }
            if let Some(ready) = self.next_answer(received_ns)? {
                return Ok(ready);
            }
        }
    }

    fn next_answer(&mut self, received_ns: i64) -> Result<Option<bool>, Error> {
        let garbled = |why: String| Error::Guest(format!("the agent's answer is garbled: {why}"));
        let mut frame = self.decoder.next_frame().map_err(|error| garbled(error.to_string()))?;
        if let Some((Kind::Event, payload)) = frame
            && self.generation == Generation::Unknown
        {
            match serde_json::from_slice(payload) {
                Ok(Event::AnnounceGeneration) => self.generation = Generation::Wanted,
                _ => return Err(garbled("an event that `post_fork` does not have".into())),
            }
            frame = self.decoder.next_frame().map_err(|error| garbled(error.to_string()))?;
        }
        let answer: Answer = match frame {
            None => return Ok(None),
            Some((Kind::Reply, payload)) => {
                serde_json::from_slice(payload).map_err(|error| garbled(error.to_string()))?
            }
            Some((Kind::Error, payload)) => {
                let refusal: Refusal =
                    serde_json::from_slice(payload).map_err(|error| garbled(error.to_string()))?;
                // An agent that knows less has refused the request whole, and done nothing.
                let shorter = self.said.as_deref().and_then(|said| refusal.shorter(said));
                if let Some(shorter) = shorter {
                    let again = PostFork { realtime_ns: realtime_ns(), ..shorter };
                    self.said = Some(Box::new(again.clone()));
                    self.send(&Request::PostFork(Box::new(again)))?;
                    return Ok(None);
                }
                return Err(Error::Guest(refusal.words()));
            }
            Some((kind, _)) => return Err(garbled(format!("a {kind:?} frame"))),
        };
        self.ipv6 |= answer.ipv6;
        if self.generation == Generation::Unknown {
            let done = answer.generation_on_request;
            self.generation = if done { Generation::Done } else { Generation::Wanted };
        }
        let off_ns = answer.realtime_ns.saturating_sub(received_ns);
        if off_ns.unsigned_abs() <= CLOCK_TOLERANCE_NS {
            return Ok(Some(true));
        }
        if self.tries == CLOCK_TRIES_MAX {
            return Err(Error::Guest(format!("its clock is still {off_ns} ns off the host's")));
        }
        self.tries += 1;
        self.send(&Request::AdjustTime(AdjustTime { offset_ns: off_ns.saturating_neg() }))?;
        Ok(None)
    }

    fn send(&mut self, request: &Request) -> Result<(), Error> {
        let mut bytes = Vec::new();
        let payload = serde_json::to_vec(request)
            .map_err(|error| Error::Guest(format!("the request cannot be encoded: {error}")))?;
        frame::encode(Kind::Request, &payload, &mut bytes)
            .map_err(|error| Error::Guest(error.to_string()))?;
        // A few hundred bytes always fit into an empty socket buffer.
        self.stream.write_all(&bytes).map_err(Error::io("send to the agent"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_proto::guest::Network;
    use forkd_proto::limits::FRAME_PAYLOAD_MAX;

    const IDENTITY: Identity<'_> = Identity {
        id: "sb-test",
        hostname: "sb-test",
        machine_id: "00000000000000000000000000000000",
        boot_id: "00000000-0000-4000-8000-000000000000",
        network: None,
        memory_bytes: None,
    };

    /// A conversation about an address of both families, with what the agent was told.
    fn start_v6() -> (Handshake, UnixStream, PostFork) {
        let network = ChildNetwork {
            tap: "fk0000".to_owned(),
            mac: "02:00:0a:00:00:02".to_owned(),
            address: "10.0.0.2/30".to_owned(),
            gateway: None,
            address_v6: Some("fd00::2/64".to_owned()),
            gateway_v6: Some("fd00::1".to_owned()),
            dns: Vec::new(),
        };
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let identity = Identity { network: Some(&network), ..IDENTITY };
        let handshake = Handshake::start(ours, identity, None).unwrap();
        let told = told(&mut theirs);
        (handshake, theirs, told)
    }

    fn told(agent: &mut UnixStream) -> PostFork {
        let request = frame::read_frame(agent).unwrap().unwrap();
        match Request::parse(&request.payload).unwrap() {
            Request::PostFork(told) => *told,
            other => panic!("not post_fork: {other:?}"),
        }
    }

    fn refuse(agent: &mut UnixStream, refusal: &str) {
        frame::write_frame(agent, Kind::Error, refusal.as_bytes()).unwrap();
    }

    #[test]
    fn an_agent_that_knows_no_ipv6_is_told_without_and_once() {
        let (mut handshake, mut agent, first) = start_v6();
        assert_eq!(first.network.as_ref().unwrap().address_v6.as_deref(), Some("fd00::2/64"));
        let refusal = r#"{"code":"invalid_request","message":"unknown","field":"network"}"#;

        refuse(&mut agent, refusal);
        assert!(!handshake.advance(realtime_ns()).unwrap());

        let second = told(&mut agent);
        assert_eq!(second.network, first.network.as_ref().map(Network::without_v6));
        assert_eq!(second.seed, first.seed);
        refuse(&mut agent, refusal);
        assert!(handshake.advance(realtime_ns()).is_err());
    }

    #[test]
    fn an_agent_that_knows_no_limits_is_told_none() {
        let (ours, mut agent) = UnixStream::pair().unwrap();
        let limit = DiskLimit { free_bytes: 1 << 20, used_bytes: 1 << 30 };
        let identity = Identity { memory_bytes: Some(1 << 28), ..IDENTITY };
        let mut handshake = Handshake::start(ours, identity, Some(limit)).unwrap();
        let first = told(&mut agent);
        assert_eq!((first.disk, first.memory_bytes), (Some(limit), Some(1 << 28)));
        let memory = r#"{"code":"invalid_request","message":"unknown","field":"memory_bytes"}"#;
        let refusal = r#"{"code":"invalid_request","message":"unknown","field":"disk"}"#;

        refuse(&mut agent, memory);
        assert!(!handshake.advance(realtime_ns()).unwrap());
        let second = told(&mut agent);
        assert_eq!((second.disk, second.memory_bytes), (Some(limit), None));
        refuse(&mut agent, refusal);
        assert!(!handshake.advance(realtime_ns()).unwrap());

        let third = told(&mut agent);
        assert_eq!((third.disk, third.memory_bytes, third.seed), (None, None, first.seed));
        refuse(&mut agent, refusal);
        assert!(handshake.advance(realtime_ns()).is_err());
    }

    #[test]
    fn a_refusal_of_something_else_is_the_last_word() {
        for refusal in [
            r#"{"code":"network_failed","message":"no"}"#,
            r#"{"code":"invalid_request","message":"no","field":"hostname"}"#,
        ] {
            let (mut handshake, mut agent, _) = start_v6();
            refuse(&mut agent, refusal);
            assert!(handshake.advance(realtime_ns()).is_err(), "{refusal}");
        }
    }

    #[test]
    fn that_a_guest_has_ipv6_is_known_though_its_clock_was_corrected() {
        let (mut handshake, mut agent, _) = start_v6();
        assert!(!handshake.has_ipv6());
        let wrong = format!(r#"{{"realtime_ns":{},"ipv6":true}}"#, realtime_ns() / 2);
        frame::write_frame(&mut agent, Kind::Reply, wrong.as_bytes()).unwrap();
        assert!(!handshake.advance(realtime_ns()).unwrap());

        reply(&mut agent, 0);

        assert!(handshake.advance(realtime_ns()).unwrap());
        assert!(handshake.has_ipv6());
    }

    const ASKS: &[u8] = br#"{"event":"announce_generation"}"#;

    fn reply_on_request(agent: &mut UnixStream) {
        let realtime_ns = realtime_ns();
        let body = format!(r#"{{"realtime_ns":{realtime_ns},"generation_on_request":true}}"#);
        frame::write_frame(agent, Kind::Reply, body.as_bytes()).unwrap();
    }

    #[test]
    fn the_generation_id_is_announced_when_the_agent_asks_and_before_it_answers() {
        let (mut handshake, mut agent) = start();
        assert!(!handshake.take_announcement());
        frame::write_frame(&mut agent, Kind::Event, ASKS).unwrap();

        assert!(!handshake.advance(realtime_ns()).unwrap());

        assert!(handshake.take_announcement());
        reply_on_request(&mut agent);
        assert!(handshake.advance(realtime_ns()).unwrap());
        assert!(!handshake.take_announcement());
    }

    #[test]
    fn an_answer_that_comes_with_the_wish_for_the_generation_id_is_read_as_well() {
        let (mut handshake, mut agent) = start();
        frame::write_frame(&mut agent, Kind::Event, ASKS).unwrap();
        reply_on_request(&mut agent);

        assert!(handshake.advance(realtime_ns()).unwrap());

        assert!(handshake.take_announcement());
    }

    #[test]
    fn the_generation_id_is_not_announced_to_an_agent_that_could_ask_and_does_not() {
        let (mut handshake, mut agent) = start();
        reply_on_request(&mut agent);

        assert!(handshake.advance(realtime_ns()).unwrap());

        assert!(!handshake.take_announcement());
    }

    #[test]
    fn the_generation_id_is_announced_once_to_an_agent_that_cannot_ask() {
        let (mut handshake, mut agent) = start();
        reply(&mut agent, 3_600_000_000_000);
        assert!(!handshake.advance(realtime_ns()).unwrap());
        assert!(handshake.take_announcement());
        reply(&mut agent, 0);

        assert!(handshake.advance(realtime_ns()).unwrap());

        assert!(!handshake.take_announcement());
    }

    #[test]
    fn a_second_event_and_one_of_something_else_are_garbled() {
        let other: &[u8] = br#"{"event":"started","pid":1}"#;
        for (before, last) in [(Some(ASKS), ASKS), (None, other)] {
            let (mut handshake, mut agent) = start();
            if let Some(event) = before {
                frame::write_frame(&mut agent, Kind::Event, event).unwrap();
                assert!(!handshake.advance(realtime_ns()).unwrap());
            }
            frame::write_frame(&mut agent, Kind::Event, last).unwrap();

            let error = handshake.advance(realtime_ns()).unwrap_err().to_string();

            assert!(error.contains("garbled"), "{error}");
        }
    }

    fn start() -> (Handshake, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let handshake = Handshake::start(ours, IDENTITY, None).unwrap();
        let request = frame::read_frame(&mut theirs).unwrap().unwrap();
        assert!(matches!(Request::parse(&request.payload).unwrap(), Request::PostFork(_)));
        (handshake, theirs)
    }

    fn reply(stream: &mut UnixStream, off_ns: i64) {
        let body =
            format!(r#"{{"realtime_ns":{},"reseeded":[],"hook":"none"}}"#, realtime_ns() + off_ns);
        frame::write_frame(stream, Kind::Reply, body.as_bytes()).unwrap();
    }

    #[test]
    fn an_answer_with_the_right_time_makes_the_guest_ready() {
        let (mut handshake, mut agent) = start();

        reply(&mut agent, 0);

        assert!(handshake.advance(realtime_ns()).unwrap());
    }

    #[test]
    fn a_clock_that_is_off_is_corrected_and_in_the_end_fails_the_fork() {
        let (mut handshake, mut agent) = start();
        for _ in 0..CLOCK_TRIES_MAX {
            reply(&mut agent, 3_600_000_000_000);
            assert!(!handshake.advance(realtime_ns()).unwrap());
            let request = frame::read_frame(&mut agent).unwrap().unwrap();
            assert!(matches!(Request::parse(&request.payload).unwrap(), Request::AdjustTime(_)));
        }

        reply(&mut agent, 3_600_000_000_000);

        assert!(handshake.advance(realtime_ns()).is_err());
    }

    #[test]
    fn the_farthest_times_that_a_guest_can_claim_are_not_right() {
        for claimed in [i64::MIN, i64::MAX] {
            let (mut handshake, mut agent) = start();
            let body = format!(r#"{{"realtime_ns":{claimed}}}"#);

            frame::write_frame(&mut agent, Kind::Reply, body.as_bytes()).unwrap();

            assert!(!handshake.advance(realtime_ns()).unwrap(), "{claimed}");
            let request = frame::read_frame(&mut agent).unwrap().unwrap();
            assert!(matches!(Request::parse(&request.payload).unwrap(), Request::AdjustTime(_)));
        }
    }

    #[test]
    fn a_time_that_no_clock_has_is_no_answer() {
        for claimed in ["1e300", "9223372036854775808", "null", "\"now\""] {
            let (mut handshake, mut agent) = start();
            let body = format!(r#"{{"realtime_ns":{claimed}}}"#);

            frame::write_frame(&mut agent, Kind::Reply, body.as_bytes()).unwrap();

            assert!(handshake.advance(realtime_ns()).is_err(), "{claimed}");
        }
    }

    #[test]
    fn a_refusal_of_one_byte_too_many_is_cut() {
        let (mut handshake, mut agent) = start();
        let message = "\u{1}".repeat(REFUSAL_BYTES_MAX + 1);
        let refusal = serde_json::json!({"code": message, "message": message}).to_string();
        frame::write_frame(&mut agent, Kind::Error, refusal.as_bytes()).unwrap();

        let body = handshake.advance(realtime_ns()).unwrap_err().body();

        assert_eq!(body.message.matches('\u{1}').count(), 2 * REFUSAL_BYTES_MAX);
        let frame = serde_json::to_vec(&body).unwrap();
        assert!(frame.len() < usize::try_from(FRAME_PAYLOAD_MAX).unwrap() / 8);
    }

    #[test]
    fn a_refusal_carries_the_agents_words() {
        let (mut handshake, mut agent) = start();
        let refusal = br#"{"code":"reseed_failed","message":"no entropy"}"#;

        frame::write_frame(&mut agent, Kind::Error, refusal).unwrap();

        let error = handshake.advance(realtime_ns()).unwrap_err().to_string();
        assert!(error.contains("no entropy (reseed_failed)"), "{error}");
    }
}
