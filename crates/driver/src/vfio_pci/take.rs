//! Taking a function from the kernel: by itself with iommufd, or through its group.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::{Iommu, PciAddress, VfioError, sys};

/// The class of NVMe controllers: mass storage, non-volatile memory, NVM Express.
const NVME_CLASS: &str = "0x010802";
const IOMMUFD: &str = "/dev/iommu";
pub(super) const CONTAINER: &str = "/dev/vfio/vfio";

/// The files of the system that using this function takes: for who is given few.
pub fn device_files(address: PciAddress) -> Vec<PathBuf> {
    let group = group_of(address).ok().map(group_file);
    let files = [Some(PathBuf::from(CONTAINER)), group, Some(PathBuf::from(IOMMUFD)), device_file(address)];
    files.into_iter().flatten().filter(|path| path.exists()).collect()
}

/// The device's file, and its addresses.
///
/// With iommufd where there are, and may be opened, the device's own file and iommufd's; else through the group, which kernels
/// that are built without it have.
pub(super) fn take(address: PciAddress) -> Result<(OwnedFd, Iommu), VfioError> {
    look(address)?;
    let alone = device_file(address).map(|path| Ok((open(&path)?, open(Path::new(IOMMUFD))?, path)));
    match alone {
        Some(Ok((device, iommufd, path))) => by_itself(address, device, iommufd, path),
        // Kernels may be built without groups.
        Some(Err(error)) if !group_file(group_of(address)?).exists() => Err(error),
        _ => through_group(address),
    }
}

fn by_itself(address: PciAddress, device: File, iommufd: File, path: PathBuf) -> Result<(OwnedFd, Iommu), VfioError> {
    let bind = sys::BindIommufd { iommufd: iommufd.as_raw_fd(), ..Default::default() };
    sys::exact(&device, sys::DEVICE_BIND_IOMMUFD, bind).map_err(|source| match source.raw_os_error() {
        // The kernel says the same of a function that is open elsewhere and of a group that is not whole.
        Some(libc::EBUSY | libc::EPERM | libc::EINVAL) => match group_of(address) {
            Ok(group) if kernel_has_one(&others_of(group, address)) => not_viable(address, group),
            _ => VfioError::InUse { address, path },
        },
        _ => VfioError::Kernel { address, action: "bind it to iommufd", source },
    })?;
    let iommu = Iommu::of_device(address, &device, iommufd)?;
    Ok((device.into(), iommu))
}

fn through_group(address: PciAddress) -> Result<(OwnedFd, Iommu), VfioError> {
    let number = group_of(address)?;
    let path = group_file(number);
    let group = match open(&path) {
        Err(VfioError::File { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
            return Err(VfioError::InUse { address, path });
        }
        other => other?,
    };
    let kernel = |action| move |source| VfioError::Kernel { address, action, source };
    let status = sys::exact(&group, sys::GROUP_GET_STATUS, sys::GroupStatus::default());
    if status.map_err(kernel("ask for its group"))?.flags & sys::GROUP_VIABLE == 0 {
        return Err(not_viable(address, number));
    }
    let iommu = Iommu::of_group(address, &group)?;
    let device = sys::device_fd(&group, &address.to_string()).map_err(kernel("open it"))?;
    Ok((device, iommu))
}

fn not_viable(address: PciAddress, group: u32) -> VfioError {
    let others = others_of(group, address).into_iter();
    let others = others.map(|(name, driver)| format!("{name} ({})", driver.as_deref().unwrap_or("no driver")));
    VfioError::NotViable { address, group, others: others.collect::<Vec<_>>().join(", ") }
}

fn group_file(group: u32) -> PathBuf {
    PathBuf::from(format!("/dev/vfio/{group}"))
}

/// The function's own file, from the kernel that can open functions one by one.
fn device_file(address: PciAddress) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder(address).join("vfio-dev")).ok()?;
    Some(Path::new("/dev/vfio/devices").join(entries.next()?.ok()?.file_name()))
}

fn folder(address: PciAddress) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(address.to_string())
}

pub(super) fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|source| VfioError::File { action: "open", path: path.to_owned(), source })
}

/// The last part of what a link leads to.
fn linked(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Whether the function is an NVMe controller that the kernel would give us.
fn look(address: PciAddress) -> Result<(), VfioError> {
    let folder = folder(address);
    let path = folder.join("class");
    let mut class = String::new();
    match File::open(&path).and_then(|mut file| file.read_to_string(&mut class)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(VfioError::NoFunction(address)),
        Err(source) => return Err(VfioError::File { action: "read", path, source }),
    }
    if class.trim() != NVME_CLASS {
        return Err(VfioError::NotNvme { address, class: class.trim().to_owned() });
    }
    group_of(address)?;
    match linked(&folder.join("driver")) {
        Some(driver) if driver == "vfio-pci" => Ok(()),
        driver => Err(VfioError::NotBound { address, driver }),
    }
}

fn group_of(address: PciAddress) -> Result<u32, VfioError> {
    let group = linked(&folder(address).join("iommu_group")).and_then(|group| group.parse().ok());
    group.ok_or(VfioError::NoIommu(address))
}

/// The other functions of a group, and who drives each.
fn others_of(group: u32, address: PciAddress) -> Vec<(String, Option<String>)> {
    let entries = fs::read_dir(format!("/sys/kernel/iommu_groups/{group}/devices")).into_iter().flatten();
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let others = names.filter(|name| *name != address.to_string());
    others
        .map(|name| {
            let driver = linked(&Path::new("/sys/bus/pci/devices").join(&name).join("driver"));
            (name, driver)
        })
        .collect()
}

/// Whether one of these does what the kernel says while we would do what guests say: bridges do not.
fn kernel_has_one(others: &[(String, Option<String>)]) -> bool {
    others
        .iter()
        .filter_map(|(_, driver)| driver.as_deref())
        .any(|driver| !["vfio-pci", "pci-stub", "pcieport"].contains(&driver))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_and_what_was_given_away_are_not_the_kernels() {
        let other = |driver: Option<&str>| ("0000:00:01.0".to_owned(), driver.map(str::to_owned));
        assert!(!kernel_has_one(&[]));
        assert!(!kernel_has_one(&[other(None), other(Some("pcieport")), other(Some("vfio-pci"))]));
        assert!(kernel_has_one(&[other(None), other(Some("nvme"))]));
    }
}
