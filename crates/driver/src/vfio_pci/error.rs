//! Why a physical function could not be had, with what to do about it.

use std::{io, path::PathBuf};

use thiserror::Error;

use super::PciAddress;

/// Why a physical function could not be had or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VfioError {
    /// Nothing is at this address.
    #[error("there is no PCI function {0}; \"lspci -D\" lists them")]
    NoFunction(PciAddress),
    /// It is something else than an NVMe controller.
    #[error("PCI function {address} is no NVMe controller (its class is {class})")]
    NotNvme {
        /// Where it is.
        address: PciAddress,
        /// What it says it is.
        class: String,
    },
    /// The machine gives devices no addresses of their own.
    #[error(
        "PCI function {0} is behind no IOMMU, so that its transfers could not be kept to the memory that it is given: enable VT-d or \
         AMD-Vi in the firmware, and boot with intel_iommu=on (or amd_iommu=on) on the kernel's command line"
    )]
    NoIommu(PciAddress),
    /// The kernel's own driver, or none, has it.
    #[error(
        "PCI function {address} is bound to {}, not to vfio-pci. Unmount what is on it, then as root:\n  modprobe vfio-pci\n  \
         echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override\n{}  \
         echo {address} > /sys/bus/pci/drivers_probe",
        driver.as_deref().unwrap_or("no driver"),
        if driver.is_some() { format!("  echo {address} > /sys/bus/pci/devices/{address}/driver/unbind\n") } else { String::new() }
    )]
    NotBound {
        /// Where it is.
        address: PciAddress,
        /// Who has it.
        driver: Option<String>,
    },
    /// Another function of its group has a driver of the kernel's.
    #[error(
        "PCI function {address} shares IOMMU group {group} with functions that the kernel drives: bind these to vfio-pci too, or unbind \
         them, for a group is given away as one: {others}"
    )]
    NotViable {
        /// Where it is.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// The other functions and their drivers.
        others: String,
    },
    /// The kernel knows no way to reset it alone.
    #[error("PCI function {0} has no reset of its own")]
    NoReset(PciAddress),
    /// Somebody else has it, or its group.
    #[error("PCI function {address} is in use: another process, or another volume of this one, has {}", path.display())]
    InUse {
        /// Where it is.
        address: PciAddress,
        /// The file that it was to be had by.
        path: PathBuf,
    },
    /// The kernel's VFIO is not the one that we know.
    #[error("the kernel's VFIO lacks {0}: load the modules vfio-pci and vfio_iommu_type1, or iommufd")]
    Unknown(&'static str),
    /// A file of the system could not be opened or read.
    #[error("cannot {action} {}{}", path.display(), advice(source))]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// Which.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A request to the kernel failed.
    #[error("PCI function {address}: cannot {action}{}", advice(source))]
    Kernel {
        /// Where it is.
        address: PciAddress,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Memory that is not whole pages, or outside the addresses that the IOMMU translates.
    #[error("PCI function {address}: {size:#x} bytes at {iova:#x} are not within the addresses that the IOMMU translates")]
    BadRange {
        /// Where it is.
        address: PciAddress,
        /// First device address.
        iova: u64,
        /// Bytes.
        size: usize,
    },
    /// A region that the function has not, or bytes beyond one.
    #[error("PCI function {address}: {size} bytes at {offset:#x} are not in region {region}")]
    NoRegion {
        /// Where it is.
        address: PciAddress,
        /// Which region.
        region: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: usize,
    },
    /// The kernel says that the device is being taken away.
    #[error("PCI function {0} is being removed")]
    Removing(PciAddress),
    /// The kernel reports an error that the device cannot go on after (PCI Express AER).
    #[error("PCI function {0} has reported an error that it does not recover from")]
    Broken(PciAddress),
}

fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            ": give this user the group's file in /dev/vfio and /dev/vfio/vfio, or the function's in /dev/vfio/devices and /dev/iommu"
        }
        Some(libc::ENOMEM) => ": too much memory is locked already; raise the limit (LimitMEMLOCK, ulimit -l)",
        _ => "",
    }
}
