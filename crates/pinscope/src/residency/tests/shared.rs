use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::pin::Advert;

const CALM: FaultPlan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: false };

#[test]
fn what_a_daemon_keeps_is_used_in_place_and_read_once_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let folder = dir.path().join("adverts");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut advert = Advert::claim_in(&folder, "a1", map.files()).unwrap();
    // Experts 0 to 2 of layer 0, 3 of layer 1, and one that there is not.
    advert.publish(&[0, 1, 2, 9, 999].map(ExpertId)).unwrap();

    for arena in [Layout::full_bytes(&map), Layout::full_bytes(&map) / 2] {
        let mut r = residency(&map, arena, CALM);
        let daemon = Advert::find_in(&folder, "a1", map.files()).unwrap();
        assert_eq!(r.share(daemon).unwrap(), 4);
        pass(&mut r, &file, 0, &[0, 1, 2]).unwrap();
        pass(&mut r, &file, 1, &[3, 4]).unwrap();
        let c = r.stats().decode;
        assert_eq!((c.hits, c.pinned_hits, c.misses), (4, 4, 1));
    }

    let mut r = residency(&map, Layout::full_bytes(&map) / 2, CALM);
    r.share(Advert::find_in(&folder, "a1", map.files()).unwrap()).unwrap();
    pass(&mut r, &file, 0, &[0, 1]).unwrap();
    drop(advert);
    pass(&mut r, &file, 0, &[0, 1]).unwrap();
    assert_eq!(r.stats().decode.misses, 2);
}
