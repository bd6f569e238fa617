//! Making the devices of a machine: fresh, or as they were when a machine was saved.

use std::fs::File;
use std::sync::Arc;

use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::block::Block;
use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::net::Net;
use forkd_devices::virtio::rng::Rng;
use forkd_devices::virtio::vsock::Vsock;
use forkd_proto::control::TapConfig;
use vm_superio::Serial;

use crate::disk::host_disk::HostDisk;
use crate::error::Error;
use crate::io::bus::{Console, Devices, Line, Lines};
use crate::io::console::ConsoleLog;
use crate::io::entropy::KernelEntropy;
use crate::io::tap::Tap;
use crate::io::vsock::VsockHost;
use crate::layout;
use crate::machine::place::Place;
use crate::snapshot::state::{MachineState, SerialState};
use crate::sys::descriptors;

/// MAC address of a machine that was given none; locally administered.
const MAC_DEFAULT: [u8; 6] = [0x02, 0xf0, 0x4b, 0xd0, 0x00, 0x01];

/// Largest payload of a frame, in bytes; the guest is told.
const MTU: u16 = 1500;

/// Twenty bytes that the guest sees as the serial number of its disk.
const DISK_ID: [u8; 20] = *b"forkd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn console_log(place: &Place) -> ConsoleLog {
    ConsoleLog::new(place.directory.join("console.log"))
}

fn vsock_host(device: Mmio<Vsock>, place: &Place) -> VsockHost {
    let path = place.directory.join("vsock.sock");
    VsockHost::new(device, path, Arc::clone(&place.epoll), place.vsock_tag)
}

/// Devices that no driver has touched.
///
/// # Errors
///
/// [`Error::Invalid`] if `network` has no MAC address or its tap no valid name; [`Error::Io`] if
/// the tap cannot be opened.
pub fn fresh_devices(
    lines: &Arc<Lines>,
    place: &Place,
    disk: Option<HostDisk>,
    network: Option<&TapConfig>,
) -> Result<Devices, Error> {
    let tap = network.map(|network| descriptors::open_tap(&network.tap)).transpose()?;
    let mac = network.map_or(Ok(MAC_DEFAULT), |network| parse_mac(&network.mac))?;
    Ok(Devices {
        serial: Serial::new(Line::new(lines, layout::SERIAL_GSI), console_log(place)),
        block: disk.map(|disk| Mmio::new(Block::new(disk, DISK_ID))),
        net: Mmio::new(Net::new(Tap::new(tap), mac, MTU)),
        vsock: vsock_host(Mmio::new(Vsock::new()), place),
        rng: Mmio::new(Rng::new(KernelEntropy)),
    })
}

/// The devices of `state`, with host's ends of their own.
///
/// # Errors
///
/// [`Error::Damaged`] if a device refuses its state; as [`fresh_devices`] for the tap.
pub fn saved_devices(
    state: &MachineState,
    lines: &Arc<Lines>,
    place: &Place,
    disk: Option<HostDisk>,
    tap: Option<File>,
) -> Result<Devices, Error> {
    let damaged = |what: &'static str| {
        move |error: &dyn std::fmt::Display| Error::Damaged(format!("state of {what}: {error}"))
    };
    let tap = Tap::new(tap);
    let block = match (&state.block, disk) {
        (Some((transport, _)), Some(disk)) => Some(
            Mmio::restore(transport, Block::new(disk, DISK_ID))
                .map_err(|error| damaged("the disk")(&error))?,
        ),
        _ => None,
    };
    Ok(Devices {
        serial: saved_serial(
            &state.serial,
            Line::new(lines, layout::SERIAL_GSI),
            console_log(place),
        )?,
        block,
        net: Mmio::restore(&state.net.0, Net::new(tap, state.net.1, MTU))
            .map_err(|error| damaged("the network")(&error))?,
        vsock: vsock_host(saved_vsock(state)?, place),
        rng: Mmio::restore(&state.rng, Rng::new(KernelEntropy))
            .map_err(|error| damaged("the entropy device")(&error))?,
    })
}

/// The registers of the serial console.
#[must_use]
pub fn save_serial(serial: &Console) -> SerialState {
    let state = serial.state();
    SerialState {
        baud_divisor_low: state.baud_divisor_low,
        baud_divisor_high: state.baud_divisor_high,
        interrupt_enable: state.interrupt_enable,
        interrupt_identification: state.interrupt_identification,
        line_control: state.line_control,
        line_status: state.line_status,
        modem_control: state.modem_control,
        modem_status: state.modem_status,
        scratch: state.scratch,
        in_buffer: state.in_buffer,
    }
}

/// The vsock device of `state`.
///
/// # Errors
///
/// [`Error::Damaged`].
pub fn saved_vsock(state: &MachineState) -> Result<Mmio<Vsock>, Error> {
    let damaged = |error| Error::Damaged(format!("state of vsock: {error}"));
    let vsock = Vsock::restore(&state.vsock.1).map_err(damaged)?;
    Mmio::restore(&state.vsock.0, vsock).map_err(damaged)
}

/// The serial console as it was `saved`, which writes to `log`.
///
/// # Errors
///
/// [`Error::Damaged`].
pub fn saved_serial(saved: &SerialState, line: Line, log: ConsoleLog) -> Result<Console, Error> {
    let state = vm_superio::serial::SerialState {
        baud_divisor_low: saved.baud_divisor_low,
        baud_divisor_high: saved.baud_divisor_high,
        interrupt_enable: saved.interrupt_enable,
        interrupt_identification: saved.interrupt_identification,
        line_control: saved.line_control,
        line_status: saved.line_status,
        modem_control: saved.modem_control,
        modem_status: saved.modem_status,
        scratch: saved.scratch,
        in_buffer: saved.in_buffer.clone(),
    };
    Serial::from_state(&state, line, vm_superio::serial::NoEvents, log)
        .map_err(|error| Error::Damaged(format!("state of the serial console: {error:?}")))
}

/// The MAC address is the first field of the device's configuration space (virtio 1.2 §5.1.4).
#[must_use]
pub fn mac_of(net: &Net<Tap>) -> [u8; 6] {
    let mut mac = [0; 6];
    net.read_config(0, &mut mac);
    mac
}

fn parse_mac(text: &str) -> Result<[u8; 6], Error> {
    let bytes: Vec<u8> =
        text.split(':').filter_map(|part| u8::from_str_radix(part, 16).ok()).collect();
    <[u8; 6]>::try_from(bytes.as_slice()).map_err(|_| Error::Invalid {
        field: "mac",
        problem: format!("{text:?} is not six hex bytes with colons"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_has_six_bytes() {
        assert_eq!(parse_mac("02:00:00:00:00:ff").unwrap(), [2, 0, 0, 0, 0, 255]);
        assert!(parse_mac("02:00:00:00:00").is_err());
        assert!(parse_mac("02:00:00:00:00:00:00").is_err());
    }
}
