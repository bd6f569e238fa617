//! What a host says to the agent inside a guest; see `protocol/guest/PROTOCOL.md`.
//!
//! [`Request::parse`] is the agent's way in: it refuses what the protocol does not allow and names
//! the member at fault. Everything else is plain serde, and lenient, as clients are to be.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::InvalidRequest;
use crate::limits::{
    ARGS_MAX, ENV_MAX, HOSTNAME_MAX, PATH_MAX, SEED_BYTES, TIMEOUT_MAX_S, WATCH_MAX_S,
};
use crate::{Text, parse};

mod connect;
mod files;
mod limit;
mod reply;
mod runtime;

pub use connect::*;
pub use files::*;
pub use limit::*;
pub use reply::*;
pub use runtime::*;

/// Environment variables, by name.
pub type Env = BTreeMap<String, Text>;

/// One operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Is the agent there, and how is its runtime?
    Ping,
    /// Sends `data` back; measures the transport.
    Echo(Echo),
    /// Runs a process.
    Exec(Exec),
    /// Evaluates code in the warm runtime.
    Eval(Eval),
    /// Connects to a program that listens.
    Connect(Connect),
    /// Streams a file out.
    ReadFile(ReadFile),
    /// Streams a file in.
    WriteFile(WriteFile),
    /// Streams a tree out.
    ReadArchive(PathOnly),
    /// Streams a tree in.
    WriteArchive(WriteArchive),
    /// Describes one path.
    Stat(PathOnly),
    /// Describes what a directory holds.
    ListDir(PathOnly),
    /// Makes a directory.
    MakeDir(MakeDir),
    /// Renames.
    Move(Move),
    /// Removes.
    Remove(Remove),
    /// Warms the guest up before its snapshot.
    Warm(Warm),
    /// Sets the image's defaults.
    Configure(Configure),
    /// Makes the guest cheap to fork.
    Quiesce,
    /// Writes the root file system out and lets nobody write to it any more.
    Freeze,
    /// Makes a forked guest somebody of its own.
    PostFork(Box<PostFork>),
    /// Sets the wall clock.
    SetTime(SetTime),
    /// Moves the wall clock.
    AdjustTime(AdjustTime),
    /// Changes what the guest may use of its memory.
    Limit(Limit),
    /// Begins to watch for times at which the guest is paused.
    Watch(Watch),
    /// Ends that, and says what it saw.
    Watched(Watched),
    /// Powers the machine off.
    Shutdown,
}

impl Request {
    /// Reads the payload of a REQUEST frame and checks all that can be checked without a kernel.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`], naming the member: not a JSON object, an unknown `op`, a member that is
    /// missing, unknown or of the wrong type, or a value out of its range.
    pub fn parse(payload: &[u8]) -> Result<Self, InvalidRequest> {
        let mut members = parse::object(payload)?;
        let op = parse::take_tag(&mut members, "op")?;
        let request = match op.as_str() {
            "ping" => parse::members(members).map(|Nothing {}| Self::Ping),
            "echo" => parse::members(members).map(Self::Echo),
            "exec" => parse::members(members).map(Self::Exec),
            "eval" => parse::members(members).map(Self::Eval),
            "connect" => parse::members(members).map(Self::Connect),
            "read_file" => parse::members(members).map(Self::ReadFile),
            "write_file" => parse::members(members).map(Self::WriteFile),
            "read_archive" => parse::members(members).map(Self::ReadArchive),
            "write_archive" => parse::members(members).map(Self::WriteArchive),
            "stat" => parse::members(members).map(Self::Stat),
            "list_dir" => parse::members(members).map(Self::ListDir),
            "make_dir" => parse::members(members).map(Self::MakeDir),
            "move" => parse::members(members).map(Self::Move),
            "remove" => parse::members(members).map(Self::Remove),
            "warm" => parse::members(members).map(Self::Warm),
            "configure" => parse::members(members).map(Self::Configure),
            "quiesce" => parse::members(members).map(|Nothing {}| Self::Quiesce),
            "freeze" => parse::members(members).map(|Nothing {}| Self::Freeze),
            "post_fork" => parse::members(members).map(Self::PostFork),
            "set_time" => parse::members(members).map(Self::SetTime),
            "adjust_time" => parse::members(members).map(Self::AdjustTime),
            "limit" => parse::members(members).map(Self::Limit),
            "watch" => parse::members(members).map(Self::Watch),
            "watched" => parse::members(members).map(Self::Watched),
            "shutdown" => parse::members(members).map(|Nothing {}| Self::Shutdown),
            _ => Err(InvalidRequest::field("op", "unknown operation")),
        }?;
        request.check()?;
        Ok(request)
    }

    fn check(&self) -> Result<(), InvalidRequest> {
        match self {
            Self::Exec(exec) => exec.check(),
            Self::Eval(eval) => eval.check(),
            Self::ReadFile(read) => check_path("path", &read.path),
            Self::WriteFile(write) => {
                check_path("path", &write.path)?;
                check_mode(write.mode)
            }
            Self::WriteArchive(write) => check_path("path", &write.path),
            Self::Stat(only) | Self::ListDir(only) | Self::ReadArchive(only) => {
                check_path("path", &only.path)
            }
            Self::MakeDir(make) => {
                check_path("path", &make.path)?;
                check_mode(make.mode)
            }
            Self::Move(moved) => {
                check_path("source", &moved.source)?;
                check_path("target", &moved.target)
            }
            Self::Remove(remove) => check_path("path", &remove.path),
            Self::Warm(warm) => warm.check(),
            Self::Configure(configure) => configure.check(),
            Self::PostFork(post_fork) => post_fork.check(),
            Self::Watch(watch) => check_watch("for_s", watch.for_s),
            Self::Watched(watched) => check_watch("at_least_s", watched.at_least_s),
            Self::Ping
            | Self::Echo(_)
            | Self::Connect(_)
            | Self::Quiesce
            | Self::Freeze
            | Self::SetTime(_)
            | Self::AdjustTime(_)
            | Self::Limit(_)
            | Self::Shutdown => Ok(()),
        }
    }
}

/// No members at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// `echo`, and its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Echo {
    /// Comes back as it is.
    #[serde(default)]
    pub data: String,
}

/// `exec`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// The program and its arguments; no shell.
    pub args: Vec<Text>,
    /// Over the image's.
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    /// Working directory; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Text>,
    /// Name or `uid[:gid]`; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// SIGKILL to the process group after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Whether STDIN frames will come; otherwise standard input is `/dev/null`.
    #[serde(default)]
    pub stdin: bool,
    /// Run on a terminal of this size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<WindowSize>,
}

impl Exec {
    fn check(&self) -> Result<(), InvalidRequest> {
        check_args("args", &self.args)?;
        check_surroundings(&self.env, self.cwd.as_ref())?;
        check_timeout(self.timeout_s)
    }
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// Payload of a CONTROL frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// Send this signal to the process group.
    Signal(i32),
    /// The client's terminal has a new size.
    Resize(WindowSize),
}

impl Control {
    /// Reads the payload of a CONTROL frame.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`] if it is neither `{"signal": n}` with n in 1 to 64, nor `{"resize":
    /// {…}}`.
    pub fn parse(payload: &[u8]) -> Result<Self, InvalidRequest> {
        let control = serde_json::from_slice(payload)
            .map_err(|error| InvalidRequest::whole(format!("not a control message: {error}")))?;
        match control {
            Self::Signal(signal) if !(1..=64).contains(&signal) => {
                Err(InvalidRequest::field("signal", "not in 1 to 64"))
            }
            _ => Ok(control),
        }
    }
}

/// `configure`: each member given replaces the image's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configure {
    /// Environment of processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Env>,
    /// Working directory of processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Text>,
    /// User of processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Python run in the runtime after each fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_fork: Option<String>,
    /// Command run after each fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_fork_command: Option<Vec<Text>>,
}

impl Configure {
    fn check(&self) -> Result<(), InvalidRequest> {
        if let Some(command) = self.post_fork_command.as_ref().filter(|args| !args.is_empty()) {
            check_args("post_fork_command", command)?;
        }
        check_surroundings(self.env.as_ref().unwrap_or(&Env::new()), self.cwd.as_ref())
    }
}

/// `post_fork`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PostFork {
    /// The host's name for this sandbox.
    pub sandbox_id: String,
    /// The guest's host name from now on.
    pub hostname: String,
    /// 32 lower-case hex digits.
    pub machine_id: String,
    /// UUID.
    pub boot_id: String,
    /// Fresh random bytes, of which no other machine has ever seen any.
    pub seed: Seed,
    /// Wall clock, in nanoseconds since the epoch.
    pub realtime_ns: i64,
    /// Identity on the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// How full the root file system may become, if not as full as its disk is large; an agent that
    /// has never heard of it refuses the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskLimit>,
    /// What the guest may use of its memory, if not all; refused likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

impl PostFork {
    fn check(&self) -> Result<(), InvalidRequest> {
        let label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        let length_fits = (1..=HOSTNAME_MAX).contains(&self.hostname.len());
        if !length_fits || !self.hostname.bytes().all(label) || self.hostname.starts_with('-') {
            return Err(InvalidRequest::field("hostname", "not a host name"));
        }
        if self.machine_id.len() != 32 || !self.machine_id.bytes().all(is_lower_hex) {
            return Err(InvalidRequest::field("machine_id", "not 32 lower-case hex digits"));
        }
        if !is_uuid(&self.boot_id) {
            return Err(InvalidRequest::field("boot_id", "not a UUID in lower case"));
        }
        check_realtime(self.realtime_ns)?;
        self.network.as_ref().map_or(Ok(()), Network::check)
    }
}

/// The seed of a fork: hex on the wire, never shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Seed(pub [u8; SEED_BYTES]);

impl Seed {
    /// The seed as it travels: lower-case hex.
    #[must_use]
    pub fn to_hex(&self) -> String {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
        self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    }

    fn from_hex(text: &str) -> Option<Self> {
        let mut seed = [0; SEED_BYTES];
        if text.len() != 2 * SEED_BYTES {
            return None;
        }
        for (byte, pair) in seed.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = hex_byte(pair)?;
        }
        Some(Self(seed))
    }
}

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seed(…)")
    }
}

impl Serialize for Seed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_hex(&text).ok_or_else(|| serde::de::Error::custom("not 128 hex digits"))
    }
}

/// Identity of the one network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// `02:…`, six hex bytes.
    pub mac: String,
    /// Address and prefix length, such as `10.0.0.2/30`.
    pub address: String,
    /// Default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// IPv6 address and prefix length, such as `fd00::2/64`; an agent that has never heard of it
    /// refuses the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_v6: Option<String>,
    /// Default route of IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_v6: Option<String>,
    /// Name servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
}

impl Network {
    fn check(&self) -> Result<(), InvalidRequest> {
        let fits = self.mac_bytes().is_some()
            && self.address_and_prefix().is_some()
            && self.gateway.as_ref().is_none_or(|text| text.parse::<std::net::Ipv4Addr>().is_ok())
            && (self.address_v6.is_none() || self.address_and_prefix_v6().is_some())
            && (self.gateway_v6.as_ref())
                .is_none_or(|text| text.parse::<std::net::Ipv6Addr>().is_ok())
            && self.dns.iter().all(|text| text.parse::<std::net::IpAddr>().is_ok());
        if fits { Ok(()) } else { Err(InvalidRequest::field("network", "malformed address")) }
    }

    /// The MAC address, if it is one.
    #[must_use]
    pub fn mac_bytes(&self) -> Option<[u8; 6]> {
        let mut mac = [0; 6];
        let mut parts = self.mac.split(':');
        for byte in &mut mac {
            *byte = hex_byte(parts.next()?.as_bytes())?;
        }
        parts.next().is_none().then_some(mac)
    }

    /// The IPv4 address and its prefix length, if it is one.
    #[must_use]
    pub fn address_and_prefix(&self) -> Option<(std::net::Ipv4Addr, u8)> {
        let (address, prefix) = self.address.split_once('/')?;
        let prefix = prefix.parse().ok().filter(|bits| *bits <= 32)?;
        Some((address.parse().ok()?, prefix))
    }

    /// The IPv6 address and its prefix length, if there is one.
    #[must_use]
    pub fn address_and_prefix_v6(&self) -> Option<(std::net::Ipv6Addr, u8)> {
        let (address, prefix) = self.address_v6.as_ref()?.split_once('/')?;
        let prefix = prefix.parse().ok().filter(|bits| *bits <= 128)?;
        Some((address.parse().ok()?, prefix))
    }

    /// The same without IPv6, for agents that have never heard of it.
    #[must_use]
    pub fn without_v6(&self) -> Self {
        Self { address_v6: None, gateway_v6: None, ..self.clone() }
    }
}

/// `set_time`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetTime {
    /// Wall clock, in nanoseconds since the epoch.
    pub realtime_ns: i64,
}

/// `watch`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    /// Stop by itself after so long.
    pub for_s: f64,
}

/// `watched`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watched {
    /// Answer when it has been watched for so long, and not before.
    #[serde(default)]
    pub at_least_s: f64,
}

/// `adjust_time`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdjustTime {
    /// Nanoseconds to add to the wall clock.
    pub offset_ns: i64,
}

fn check_path(field: &str, path: &Text) -> Result<(), InvalidRequest> {
    if !path.as_bytes().starts_with(b"/") {
        return Err(InvalidRequest::field(field, "not an absolute path"));
    }
    if path.len() > PATH_MAX {
        return Err(InvalidRequest::field(field, format!("longer than {PATH_MAX} bytes")));
    }
    check_no_zero(field, path.as_bytes())
}

fn check_no_zero(field: &str, text: &[u8]) -> Result<(), InvalidRequest> {
    if text.contains(&0) {
        return Err(InvalidRequest::field(field, "contains a zero byte"));
    }
    Ok(())
}

fn check_mode(mode: Option<u32>) -> Result<(), InvalidRequest> {
    match mode {
        Some(bits) if bits > 0o7777 => Err(InvalidRequest::field("mode", "not permission bits")),
        _ => Ok(()),
    }
}

fn check_args(field: &str, args: &[Text]) -> Result<(), InvalidRequest> {
    if args.is_empty() || args.iter().take(1).any(|arg| arg.is_empty()) {
        return Err(InvalidRequest::field(field, "names no program"));
    }
    if args.len() > ARGS_MAX {
        return Err(InvalidRequest::field(field, format!("more than {ARGS_MAX} arguments")));
    }
    args.iter().try_for_each(|arg| check_no_zero(field, arg.as_bytes()))
}

fn check_surroundings(env: &Env, cwd: Option<&Text>) -> Result<(), InvalidRequest> {
    check_env(env.iter().map(|(name, value)| (name.as_str(), value.as_bytes())))?;
    cwd.map_or(Ok(()), |path| check_path("cwd", path))
}

fn check_env<'a>(
    env: impl ExactSizeIterator<Item = (&'a str, &'a [u8])>,
) -> Result<(), InvalidRequest> {
    if env.len() > ENV_MAX {
        return Err(InvalidRequest::field("env", format!("more than {ENV_MAX} variables")));
    }
    for (name, value) in env {
        if name.is_empty() || name.contains('=') {
            return Err(InvalidRequest::field("env", "a name is empty or contains '='"));
        }
        check_no_zero("env", name.as_bytes())?;
        check_no_zero("env", value)?;
    }
    Ok(())
}

fn check_timeout(timeout_s: Option<f64>) -> Result<(), InvalidRequest> {
    match timeout_s {
        Some(seconds) if !(seconds > 0.0 && seconds <= TIMEOUT_MAX_S) => Err(
            InvalidRequest::field("timeout_s", format!("not above 0 and at most {TIMEOUT_MAX_S}")),
        ),
        _ => Ok(()),
    }
}

fn check_watch(field: &str, seconds: f64) -> Result<(), InvalidRequest> {
    if (0.0..=WATCH_MAX_S).contains(&seconds) {
        return Ok(());
    }
    Err(InvalidRequest::field(field, format!("not from 0 to {WATCH_MAX_S}")))
}

fn check_realtime(realtime_ns: i64) -> Result<(), InvalidRequest> {
    if realtime_ns < 0 {
        return Err(InvalidRequest::field("realtime_ns", "before the epoch"));
    }
    Ok(())
}

/// A timeout that [`Request::parse`] has accepted, as a duration.
#[must_use]
pub fn timeout(timeout_s: f64) -> Duration {
    Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::ZERO)
}

fn is_lower_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

fn hex_byte(digits: &[u8]) -> Option<u8> {
    let [high, low] = digits else {
        return None;
    };
    Some(hex_value(*high)? << 4 | hex_value(*low)?)
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => is_lower_hex(byte),
        })
}

#[cfg(test)]
mod tests;
